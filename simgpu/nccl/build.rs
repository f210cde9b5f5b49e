//! Gives the library the name by which programs look for the real one: once a test has opened it by its path, every later look-up
//! finds it, and nothing else ever does.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libnccl.so.2");
}
