//! Prints Rust bindings to the nccl.h that is named, for `src/bindings.rs`. `generate/run` calls it with the right one.

use std::error::Error;
use std::path::Path;

use bindgen::callbacks::{IntKind, ItemInfo, ParseCallbacks};
use bindgen::{Builder, EnumVariation, Formatter, RustEdition, RustTarget};

const HEAD: &str = "// Made by generate/run from the nccl.h of the release below: change that, not this.\n\n";

/// Names and types that C leaves open.
#[derive(Debug)]
struct Choices;

impl ParseCallbacks for Choices {
    /// `ncclConfig_v23100`, whose number says little, is `ncclConfig_t` to everyone.
    fn item_name(&self, item: ItemInfo) -> Option<String> {
        let (stem, number) = item.name.rsplit_once("_v")?;
        (!number.is_empty() && number.bytes().all(|digit| digit.is_ascii_digit())).then(|| format!("{stem}_t"))
    }

    /// The type of the argument or field that a constant is for.
    fn int_macro(&self, name: &str, _value: i64) -> Option<IntKind> {
        match name {
            "NCCL_API_MAGIC" => Some(IntKind::UInt),
            "NCCL_UNIQUE_ID_BYTES" | "NCCL_WIN_REQUIRED_ALIGNMENT" => Some(IntKind::Custom { name: "usize", is_signed: false }),
            _ => Some(IntKind::Int),
        }
    }
}

fn bindings(header: &Path) -> Result<String, Box<dyn Error>> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let text = Builder::default()
        .header(header.to_str().ok_or("the header's name is not UTF-8")?)
        // Nothing of this machine but the header itself: neither its C library nor its processor.
        .clang_args(["--target=x86_64-unknown-linux-gnu", "-nostdinc", "-DNCCL_OS_LINUX"])
        .clang_args(["libc", "cuda"].map(|folder| format!("-I{}", here.join(folder).display())))
        .allowlist_item("(nccl|NCCL_).*")
        .blocklist_item("ncclRedOp_dummy_t|NCCL_UNDEF_FLOAT|NCCL_SUFFIX")
        .default_enum_style(EnumVariation::NewType { is_bitfield: false, is_global: false })
        .prepend_enum_name(false)
        .must_use_type("ncclResult_t")
        .derive_partialeq(true)
        .derive_eq(true)
        .generate_comments(false)
        .merge_extern_blocks(true)
        .use_core()
        .rust_target(RustTarget::stable(85, 0).map_err(|error| error.to_string())?)
        .rust_edition(RustEdition::Edition2024)
        .disable_header_comment()
        .formatter(Formatter::Prettyplease)
        .parse_callbacks(Box::new(Choices))
        .generate()?
        .to_string();
    // An extern block would link. The loader's macro makes methods of the same declarations.
    match text.matches("unsafe extern \"C\" {").count() {
        1 => Ok(HEAD.to_owned() + &text.replacen("unsafe extern \"C\" {", "functions! {", 1)),
        blocks => Err(format!("the functions are in {blocks} blocks, where one was expected").into()),
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let header = std::env::args_os().nth(1).ok_or("usage: generate PATH-OF-NCCL.H")?;
    print!("{}", bindings(Path::new(&header))?);
    Ok(())
}
