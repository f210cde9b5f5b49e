// What PyTorch's libraries want of CUDA and NCCL, on a machine that has neither: half a gigabyte of libraries need not be fetched
// for a store and a launcher. tests/interop/setup appends one function for every other name that they import.
//
// All say that there is no device. Where COLLECTIVES_INTEROP_PRETEND_DEVICE is set there seems to be one, and what NCCL is told is
// printed: so the real ProcessGroupNCCL exchanges a unique id over a store, up to the point where it would be used.
#include <stdio.h>
#include <stdlib.h>

#define NO_DEVICE 100

static int answer(void) { return getenv("COLLECTIVES_INTEROP_PRETEND_DEVICE") ? 0 : NO_DEVICE; }

int cudaGetDeviceCount(int *count) {
    *count = answer() == 0;
    return answer();
}

int cudaGetDevice(int *device) {
    *device = 0;
    return answer();
}

const char *cudaGetErrorString(int error) { return error ? "no device here" : "no error"; }
const char *cudaGetErrorName(int error) { return cudaGetErrorString(error); }
const char *ncclGetErrorString(int error) { return error ? "no NCCL here" : "no error"; }
const char *ncclGetLastError(void *communicator) { return ""; }

int ncclGetVersion(int *version) {
    *version = 23007;
    return answer();
}

int ncclCommGetAsyncError(void *communicator, int *error) {
    *error = 0;
    return 0;
}

struct unique_id {
    unsigned char bytes[128];
};

static void print(const char *what, int rank, int world_size, const struct unique_id *id) {
    fprintf(stdout, "%s %d %d ", what, rank, world_size);
    for (int i = 0; i < 128; i++) fprintf(stdout, "%02x", id->bytes[i]);
    fprintf(stdout, "\n");
    fflush(stdout);
}

int ncclGetUniqueId(struct unique_id *id) {
    FILE *random = fopen("/dev/urandom", "rb");
    if (!random || fread(id->bytes, sizeof id->bytes, 1, random) != 1) return 2;
    fclose(random);
    print("made", 0, 0, id);
    return answer();
}

int ncclCommInitRankConfig(void **communicator, int world_size, struct unique_id id, int rank, void *config) {
    *communicator = calloc(1, 4096);
    print("joined", rank, world_size, &id);
    return answer();
}
