//! Gives the library the name of the real one, and its symbols the version that programs request, which equals that
//! name. The compiler's own version script is anonymous, and only GNU ld can still give its symbols a version.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    for argument in ["-fuse-ld=bfd", "-Wl,-soname,libcudart.so.13", "-Wl,--default-symver"] {
        println!("cargo::rustc-cdylib-link-arg={argument}");
    }
}
