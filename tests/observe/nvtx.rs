//! NVTX ranges, as a tool built by this test sees them.

use std::path::Path;
use std::process::Command;

use collectives::{Communicator, ReduceOp};

/// A tool that writes down the ranges of a domain. Its tables are those of NVTX 3.
const TOOL: &str = r#"
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef void (*Function)(void);
struct Callbacks { size_t size; int (*table)(int, Function ***, unsigned *); };
struct Attributes { uint16_t version, size; uint32_t category; int32_t color_type; uint32_t color; int32_t payload_type, reserved;
                    uint64_t payload; int32_t message_type; const char *message; };
static FILE *out;
static void *create(const char *name) { fprintf(out, "domain %s\n", name); fflush(out); return strdup(name); }
static int push(void *domain, const struct Attributes *a) {
    fprintf(out, "push %s %d %d %s %llu\n", (char *)domain, a->version, a->size, a->message, (unsigned long long)a->payload);
    return 0;
}
static int pop(void *domain) { fprintf(out, "pop %s\n", (char *)domain); fflush(out); return 0; }
int InitializeInjectionNvtx2(const void *(*get)(uint32_t)) {
    static const unsigned sizes[] = { 0, 16, 9, 15, 7, 16, 7 };
    const struct Callbacks *callbacks = get(1);
    Function **table;
    unsigned size;
    if (!callbacks || callbacks->size != sizeof *callbacks || get(2) || !get(3)) return 0;
    for (int module = 1; module < 7; module++) {
        if (!callbacks->table(module, &table, &size) || size != sizes[module] || table[0] || table[size]) return 0;
        for (unsigned place = 1; place < size; place++) if (!table[place]) return 0;
    }
    if (callbacks->table(0, &table, &size) || callbacks->table(7, &table, &size)) return 0;
    callbacks->table(5, &table, &size);
    *table[4] = (Function)push;
    *table[5] = (Function)pop;
    *table[12] = (Function)create;
    out = fopen(getenv("TOOL_OUTPUT"), "w");
    return out != 0;
}
"#;

/// Runs the test `name` of this binary again, with the variables that load the tool.
fn again(name: &str, library: &Path, output: &Path) -> std::process::Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([name, "--exact", "--nocapture"]).env("NVTX_INJECTION64_PATH", library).env("TOOL_OUTPUT", output).output().unwrap()
}

fn is_inside() -> bool {
    std::env::var_os("TOOL_OUTPUT").is_some()
}

#[test]
fn a_tool_that_listens_gets_a_range_for_each_call() {
    if is_inside() {
        let comm = Communicator::local(1).unwrap().remove(0);
        comm.all_reduce(&mut [1.0f32; 4], ReduceOp::Min).unwrap();
        return comm.broadcast(&mut [1u8; 3], 0).unwrap();
    }
    let folder = tempfile::tempdir().unwrap();
    let [source, library, output] = ["tool.c", "libtool.so", "ranges"].map(|name| folder.path().join(name));
    std::fs::write(&source, TOOL).unwrap();
    let compiled = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source).status().unwrap();
    assert!(compiled.success());
    let ran = again("nvtx::a_tool_that_listens_gets_a_range_for_each_call", &library, &output);
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    let pop = "pop collectives";
    let expected = [
        "domain collectives",
        "push collectives 3 48 barrier 0 B 0",
        pop,
        "push collectives 3 48 all_reduce min 16 B 16",
        pop,
        "push collectives 3 48 broadcast 3 B 3",
        pop,
    ];
    assert_eq!(std::fs::read_to_string(output).unwrap().lines().collect::<Vec<_>>(), expected);
}

#[test]
fn a_tool_that_is_not_there_disturbs_nobody() {
    if is_inside() {
        return Communicator::local(1).unwrap().remove(0).barrier().unwrap();
    }
    let ran = again("nvtx::a_tool_that_is_not_there_disturbs_nobody", Path::new("/no/such/tool.so"), Path::new("/dev/null"));
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
}
