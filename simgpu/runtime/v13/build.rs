//! Gives the library the name of the real one, and its symbols the version that programs ask for, which is that same name. The compiler's
//! own list of exports has no name, and GNU ld alone can still give its symbols a version.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    for argument in ["-fuse-ld=bfd", "-Wl,-soname,libcudart.so.13", "-Wl,--default-symver"] {
        println!("cargo::rustc-cdylib-link-arg={argument}");
    }
}
