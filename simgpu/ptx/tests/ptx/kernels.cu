// Kernels of every kind that the interpreter has to run. PTX of several compilers is kept beside this file: see `generate`.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define KERNEL extern "C" __global__ void

// 16 bytes at a time, the rest by bytes.
KERNEL __launch_bounds__(512, 4) xor_bytes(u8 *out, const u8 *a, const u8 *b, u64 bytes) {
    u64 start = (u64)blockIdx.x * blockDim.x + threadIdx.x, step = (u64)gridDim.x * blockDim.x;
    for (u64 i = start; i < bytes / 16; i += step) {
        uint4 x = ((const uint4 *)a)[i], y = ((const uint4 *)b)[i];
        x.x ^= y.x, x.y ^= y.y, x.z ^= y.z, x.w ^= y.w;
        ((uint4 *)out)[i] = x;
    }
    for (u64 i = bytes / 16 * 16 + start; i < bytes; i += step) {
        out[i] = a[i] ^ b[i];
    }
}

struct Inputs {
    const u16 *from[8];
    u32 ranks;
    u8 halves;
};

__device__ float widen(u16 bits, bool half) {
    if (!half) {
        return __uint_as_float((u32)bits << 16);
    }
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ u16 narrow(float value, bool half) {
    u16 bits;
    if (half) {
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
        return bits;
    }
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
#else
    u32 word = __float_as_uint(value);
    return value != value ? 0x7fff : (u16)((word + 0x7fff + (word >> 16 & 1)) >> 16);
#endif
}

// The mean of up to eight inputs, whose pointers are chosen at run time.
KERNEL mean16(u16 *out, Inputs inputs, u64 count) {
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (u64)gridDim.x * blockDim.x) {
        float sum = 0;
        for (u32 rank = 0; rank < inputs.ranks; rank++) {
            sum += widen(inputs.from[rank][i], inputs.halves);
        }
        out[i] = narrow(sum / inputs.ranks, inputs.halves);
    }
}

// A sum of all elements: by blocks through shared memory, then by atomics.
KERNEL checksum(u64 *total, u32 *largest, const u32 *in, u64 count) {
    __shared__ u64 sums[256];
    u64 mine = 0;
    u32 most = 0;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (u64)gridDim.x * blockDim.x) {
        mine = mine * 31 + in[i];
        most = max(most, in[i]);
    }
    sums[threadIdx.x] = mine;
    __syncthreads();
    for (u32 half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) {
            sums[threadIdx.x] += sums[threadIdx.x + half];
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        atomicAdd(total, sums[0]);
    }
    atomicMax(largest, most);
}

// Counts in dynamic shared memory.
KERNEL histogram(u32 *counts, const u8 *in, u32 count) {
    extern __shared__ u32 bins[];
    for (u32 i = threadIdx.x; i < 256; i += blockDim.x) {
        bins[i] = 0;
    }
    __syncthreads();
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
        atomicAdd(&bins[in[i]], 1);
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < 256; i += blockDim.x) {
        atomicAdd(&counts[i], bins[i]);
    }
}

__constant__ u32 weights[5] = {2, 3, 5, 7, 11};
__device__ u64 calls = 100;
__device__ double offsets[3] = {0.5, -1.25, 1e300};

__device__ __noinline__ u64 power(u64 base, u32 exponent, u64 modulus, u32 *multiplications) {
    if (exponent == 0) {
        return 1 % modulus;
    }
    u64 root = power(base, exponent / 2, modulus, multiplications);
    *multiplications += 1;
    u64 square = root * root % modulus;
    return exponent % 2 ? square * (base % modulus) % modulus : square;
}

// Calls, recursion, local memory, constants, variables of the module, and 64-bit division.
KERNEL variables(u64 *out, double *real, const u64 *in, u32 count) {
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) {
        return;
    }
    u64 digits[20];
    u32 length = 0, multiplications = 0;
    for (u64 rest = in[i]; rest != 0; rest /= 7) {
        digits[length++ % 20] = rest % 7;
    }
    u64 sum = power(in[i], (u32)in[i] & 63, 1000003, &multiplications) << 32 | multiplications << 16;
    for (u32 k = 0; k < length; k++) {
        sum += digits[(in[i] + k) % length % 20] * weights[k % 5];
    }
    out[i] = sum;
    real[i] = sqrt((double)in[i]) / 3 + offsets[i % 3];
    atomicAdd(&calls, 1);
    __threadfence();
}

KERNEL read_calls(u64 *out) { *out = calls; }

// A table of branches, and integer instructions of all kinds.
KERNEL switches(u32 *out, const u32 *in, u32 count) {
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
        u32 x = in[i], y = x;
        switch (x % 11) {
        case 0: y = __popc(x); break;
        case 1: y = __clz(x) * 3; break;
        case 2: y = __brev(x) ^ i; break;
        case 3: y = __byte_perm(x, i, 0x6240); break;
        case 4: y = __funnelshift_l(x, i, x & 31); break;
        case 5: y = __umulhi(x, 0x9e3779b9u); break;
        case 6: y = (u32)((int)x / -7) % 1000; break;
        case 7: y = __ffs(x); break;
        case 8: y = __float2int_rn(__int_as_float(x & 0x4fffffffu)); break;
        case 9: y = (u8)x << 24 | (u16)x >> 8; break;
        default: y = max((int)x, (int)i) - min(x, i); break;
        }
        out[i] = y;
    }
}

// Shuffles, votes and matches.
KERNEL warps(u32 *out, const u32 *in) {
    u32 i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x % 32;
    u32 x = in[i], sum = x;
    for (int step = 16; step > 0; step /= 2) {
        sum += __shfl_down_sync(~0u, sum, step);
    }
    u32 all = __shfl_sync(~0u, sum, 0);
    u32 scan = x;
    for (int step = 1; step < 32; step *= 2) {
        u32 other = __shfl_up_sync(~0u, scan, step);
        scan += lane >= step ? other : 0;
    }
    u32 odd = __ballot_sync(~0u, x & 1);
    u32 pairs = __shfl_xor_sync(~0u, x, 3, 8);
    u32 third = 0;
    if (lane % 3 == 0) {
        third = __popc(__activemask()) * 1000 + __shfl_sync(__activemask(), x, 3);
    }
    u32 same = __match_any_sync(~0u, x % 4);
    u32 votes = (__any_sync(~0u, x > 4000000000u) ? 1 : 0) | (__all_sync(~0u, x > 100) ? 2 : 0);
    out[i] = all ^ scan * 3 ^ odd * 5 ^ pairs * 7 ^ third * 11 ^ same * 13 ^ votes * 17;
    __syncwarp();
}

// A matrix turned around by tiles, with blocks of two dimensions.
KERNEL transpose(float *out, const float *in, u32 width, u32 height) {
    __shared__ float tile[16][17];
    u32 x = blockIdx.x * 16 + threadIdx.x, y = blockIdx.y * 16 + threadIdx.y;
    if (x < width && y < height) {
        tile[threadIdx.y][threadIdx.x] = in[(u64)y * width + x];
    }
    __syncthreads();
    x = blockIdx.y * 16 + threadIdx.x, y = blockIdx.x * 16 + threadIdx.y;
    if (x < height && y < width) {
        out[(u64)y * height + x] = tile[threadIdx.x][threadIdx.y];
    }
}

// Threads that wait for others through memory, and barriers that count.
KERNEL waiting(u32 *out) {
    __shared__ volatile u32 flag;
    if (threadIdx.x == 0) {
        flag = 0;
    }
    u32 votes = __syncthreads_count(threadIdx.x % 3 == 0);
    if (threadIdx.x == 1) {
        while (flag != 1) {
        }
        flag = 2;
    }
    if (threadIdx.x == 40) {
        flag = 1;
    }
    int any = __syncthreads_or(threadIdx.x == 7), all = __syncthreads_and(threadIdx.x < 63);
    out[threadIdx.x] = votes * 100 + flag * 10 + (any ? 1 : 0) + (all ? 2 : 0);
}
