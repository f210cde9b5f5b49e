//! Gives the library the name under which programs look for the real one. Once a test has opened it by its path, every
//! later look-up finds it; without that, none does.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libnvidia-ml.so.1");
}
