//! Gives the library the name of the real one, and its symbols the version that programs request, which equals that
//! name. The compiler's own list of exports has no version, and only GNU ld can still add one to its symbols.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    for argument in ["-fuse-ld=bfd", "-Wl,-soname,libcudart.so.13", "-Wl,--default-symver"] {
        println!("cargo::rustc-cdylib-link-arg={argument}");
    }
}
