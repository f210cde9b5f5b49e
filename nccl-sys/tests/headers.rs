//! The bindings compared with NCCL's own headers, as a C compiler reads them.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(unsafe_code, reason = "a struct of C's is valid when it is all zeros, and has bytes")]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use common::header::Header;
use common::{NEWEST, RELEASES, cc, output, run_c};
use nccl_sys::*;

/// The offset and size of each field by name; the empty name has the size and alignment of the struct.
type Layout = BTreeMap<String, (usize, usize)>;

/// Returns the layouts of our structs. The destructuring ensures that no field is forgotten.
macro_rules! layouts {
    ($($name:ident { $($field:ident),* })*) => {
        BTreeMap::from([$((stringify!($name), {
            // SAFETY: all of these structs consist of numbers and pointers, for which zeros are valid.
            let value: $name = unsafe { std::mem::zeroed() };
            let $name { $($field),* } = &value;
            let mut layout = Layout::from([(String::new(), (size_of::<$name>(), align_of::<$name>()))]);
            $(layout.insert(stringify!($field).to_owned(), (std::mem::offset_of!($name, $field), size_of_val($field)));)*
            layout
        })),*])
    };
}

fn our_layouts() -> BTreeMap<&'static str, Layout> {
    layouts! {
        ncclUniqueId { internal }
        ncclConfig_t {
            size, magic, version, blocking, cgaClusterSize, minCTAs, maxCTAs, netName, splitShare, trafficClass, commName, collnetEnable,
            CTAPolicy, shrinkShare, nvlsCTAs, nChannelsPerNetPeer, nvlinkCentricSched, graphUsageMode, numRmaCtx, maxP2pPeers,
            graphStreamOrdering, launchOrderImplicit, numRmaSig, rmaEagerInit, hostCftMode, nvlsHostMode
        }
        ncclConfigExt_t { next, key, val }
        ncclCollConfig_t {
            size, magic, version, ext, minCTAs, maxCTAs, nvlsCTAs, cgaClusterSize, algSelection, forceAlgSelection, CTAPolicy,
            userProfilerTag, launchCompletionEvent
        }
        ncclSimInfo_t { size, magic, version, estimatedTime }
        ncclWaitSignalDesc_t { opCnt, peer, sigIdx, ctx }
        ncclEncryptionConfig_t { size, magic, version, mode, psk }
    }
}

#[test]
fn structs_are_laid_out_as_c_lays_them_out_and_older_ones_are_their_beginnings() {
    let ours = our_layouts();
    for release in RELEASES {
        let Some(path) = release.header() else { continue };
        let header = Header::read(&path);
        let mut source = "#include <stdio.h>\n#include \"nccl.h\"\nint main(void) {\n".to_owned();
        for (name, fields) in header.structs() {
            writeln!(source, "printf(\"{name}  %zu %zu\\n\", sizeof({name}), _Alignof({name}));").unwrap();
            for field in fields {
                writeln!(source, "printf(\"{name} {field} %zu %zu\\n\", offsetof({name}, {field}), sizeof((({name}*)0)->{field}));")
                    .unwrap();
            }
        }
        source += "return 0; }\n";
        let mut theirs = BTreeMap::<&str, Layout>::new();
        let printed = run_c(&path, &source);
        for line in printed.lines() {
            let [name, field, offset, size] = line.split(' ').collect::<Vec<_>>().try_into().unwrap();
            theirs.entry(name).or_default().insert(field.to_owned(), (offset.parse().unwrap(), size.parse().unwrap()));
        }
        println!("{release:?}: {} structs, {} fields", theirs.len(), printed.lines().count() - theirs.len());
        if release.version == NEWEST.version {
            assert_eq!(theirs, ours);
        }
        for (name, layout) in &theirs {
            let end = layout[""].0;
            assert!(end <= ours[name][""].0, "{name} has shrunk since {}", release.version);
            let beginning = ours[name].iter().filter(|(field, (offset, _))| !field.is_empty() && *offset < end);
            let fields = layout.iter().filter(|(field, _)| !field.is_empty());
            assert!(fields.clone().all(|(field, place)| ours[name].get(field) == Some(place)), "{name} of {}: {layout:?}", release.version);
            // New fields may also lie in former padding at the end.
            assert!(beginning.count() - fields.count() <= 1, "{name} of {} lacks fields in between", release.version);
        }
    }
}

/// Returns the bytes of each field of a struct's initial value, in hexadecimal.
macro_rules! initial {
    ($($name:ident)*) => {
        BTreeMap::from([$((stringify!($name), {
            let value = $name::new();
            let layout = &our_layouts()[stringify!($name)];
            let fields = layout.iter().filter(|(field, _)| !field.is_empty());
            fields.map(|(field, &(offset, size))| {
                // SAFETY: the field lies within the value, and a field has no padding.
                let bytes = unsafe { std::slice::from_raw_parts((&raw const value).cast::<u8>().add(offset), size) };
                (field.clone(), bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>())
            }).collect::<BTreeMap<String, String>>()
        })),*])
    };
}

#[test]
fn initial_values_are_those_of_the_headers_macros() {
    let ours = initial!(ncclConfig_t ncclCollConfig_t ncclSimInfo_t ncclEncryptionConfig_t);
    let macros = [
        ("ncclConfig_t", "NCCL_CONFIG_INITIALIZER"),
        ("ncclCollConfig_t", "NCCL_COLLCONFIG_INITIALIZER"),
        ("ncclSimInfo_t", "NCCL_SIM_INFO_INITIALIZER"),
        ("ncclEncryptionConfig_t", "NCCL_ENCRYPTION_CONFIG_INITIALIZER"),
    ];
    for release in RELEASES {
        let Some(path) = release.header() else { continue };
        let header = Header::read(&path);
        let mut source = "#include <stdio.h>\n#include \"nccl.h\"\n\
            static void hex(void *p, size_t n) { for (size_t i = 0; i < n; i++) printf(\"%02x\", ((unsigned char *)p)[i]); puts(\"\"); }\n\
            int main(void) {\n"
            .to_owned();
        let structs = header.structs();
        let mut expected = 0;
        for (name, initialiser) in macros {
            let Some((_, fields)) = structs.iter().find(|(known, _)| *known == name) else { continue };
            writeln!(source, "{{ {name} x = {initialiser};").unwrap();
            // The fields `size` and `version` differ between headers.
            for field in fields.iter().filter(|field| release.version == NEWEST.version || !["size", "version"].contains(*field)) {
                writeln!(source, "printf(\"{name} {field} \"); hex(&x.{field}, sizeof x.{field});").unwrap();
                expected += 1;
            }
            writeln!(source, "}}").unwrap();
        }
        let printed = run_c(&path, &(source + "return 0; }\n"));
        assert!(expected > 5 && printed.lines().count() == expected);
        for line in printed.lines() {
            let [name, field, bytes] = line.split(' ').collect::<Vec<_>>().try_into().unwrap();
            assert_eq!(bytes, ours[name][field], "{name}.{field} of {}", release.version);
        }
    }
}

/// Returns the value of each constant by name; the type's own name has its size.
macro_rules! constants {
    ($($type:ident: $integer:ty { $($name:ident),* })*) => {
        BTreeMap::from([$((stringify!($type), BTreeMap::from([
            (stringify!($type), size_of::<$type>() as i64), $((stringify!($name), i64::from($type::$name.0 as $integer))),*
        ]))),*])
    };
}

#[test]
fn enums_have_the_values_of_the_headers() {
    let ours = constants! {
        ncclResult_t: u32 {
            ncclSuccess, ncclUnhandledCudaError, ncclSystemError, ncclInternalError, ncclInvalidArgument, ncclInvalidUsage,
            ncclRemoteError, ncclInProgress, ncclTimeout, ncclNumResults
        }
        ncclHostCftMode_t: i32 { ncclHostCftDefault, ncclHostCftEnable, ncclHostCftDisable, ncclHostCftFallback }
        ncclNvlsHostMode_t: i32 {
            ncclNvlsHostModeDefault, ncclNvlsHostModeEnable, ncclNvlsHostModeDisableTransport, ncclNvlsHostModeDisableSymmetricMultimem,
            ncclNvlsHostModeDisable
        }
        ncclCommMemStat_t: u32 { ncclStatGpuMemSuspend, ncclStatGpuMemSuspended, ncclStatGpuMemPersist, ncclStatGpuMemTotal }
        ncclRedOp_t: u32 { ncclSum, ncclProd, ncclMax, ncclMin, ncclAvg, ncclNumOps, ncclMaxRedOp }
        ncclDataType_t: u32 {
            ncclInt8, ncclChar, ncclUint8, ncclInt32, ncclInt, ncclUint32, ncclInt64, ncclUint64, ncclFloat16, ncclHalf, ncclFloat32,
            ncclFloat, ncclFloat64, ncclDouble, ncclBfloat16, ncclFloat8e4m3, ncclFloat8e5m2, ncclNumTypes
        }
        ncclScalarResidence_t: u32 { ncclScalarDevice, ncclScalarHostImmediate }
        ncclEncryptionMode_t: u32 { NCCL_ENCRYPTION_MODE_NONE, NCCL_ENCRYPTION_MODE_PSK }
    };
    for release in RELEASES {
        let Some(path) = release.header() else { continue };
        let header = Header::read(&path);
        let mut source = "#include <stdio.h>\n#include \"nccl.h\"\nint main(void) {\n".to_owned();
        for (name, constants) in header.enums().iter().filter(|(name, _)| *name != "ncclRedOp_dummy_t") {
            writeln!(source, "printf(\"{name} {name} %zu\\n\", sizeof({name}));").unwrap();
            for constant in constants {
                writeln!(source, "printf(\"{name} {constant} %lld\\n\", (long long){constant});").unwrap();
            }
        }
        let printed = run_c(&path, &(source + "return 0; }\n"));
        let mut theirs = BTreeMap::<&str, BTreeMap<&str, i64>>::new();
        for line in printed.lines() {
            let [name, constant, value] = line.split(' ').collect::<Vec<_>>().try_into().unwrap();
            theirs.entry(name).or_default().insert(constant, value.parse().unwrap());
        }
        if release.version == NEWEST.version {
            assert_eq!(theirs, ours);
        }
        // Only the number of constants changes between releases.
        for (name, constants) in &theirs {
            for (constant, value) in constants.iter().filter(|(constant, _)| !constant.starts_with("ncclNum")) {
                assert_eq!(ours[name].get(constant), Some(value), "{constant} of {}", release.version);
            }
        }
    }
}

#[test]
fn plain_constants_have_the_values_of_the_headers() {
    macro_rules! plain { ($($name:ident)*) => { [$((stringify!($name), $name as i64)),*] }; }
    let ours = plain! {
        NCCL_UNIQUE_ID_BYTES NCCL_SPLIT_NOCOLOR NCCL_API_MAGIC NCCL_WIN_DEFAULT NCCL_WIN_COLL_SYMMETRIC NCCL_WIN_STRICT_ORDERING
        NCCL_WIN_GIN_ONLY NCCL_WIN_CFT_COUNTED NCCL_WIN_REQUIRED_ALIGNMENT NCCL_CTA_POLICY_DEFAULT NCCL_CTA_POLICY_EFFICIENCY
        NCCL_CTA_POLICY_ZERO NCCL_SHRINK_DEFAULT NCCL_SHRINK_ABORT NCCL_REVOKE_DEFAULT NCCL_SUSPEND_MEM NCCL_CONFIG_UNDEF_INT
        NCCL_UNDEF_FLOAT NCCL_MAJOR NCCL_MINOR NCCL_PATCH NCCL_VERSION_CODE
    };
    for release in RELEASES {
        let Some(path) = release.header() else { continue };
        let mut source = "#include <stdio.h>\n#include \"nccl.h\"\nint main(void) {\n".to_owned();
        for (name, _) in ours {
            writeln!(source, "#ifdef {name}\nprintf(\"{name} %lld\\n\", (long long)({name}));\n#endif").unwrap();
        }
        let printed = run_c(&path, &(source + "return 0; }\n"));
        let theirs: BTreeMap<&str, i64> =
            printed.lines().map(|line| line.split_once(' ').unwrap()).map(|(k, v)| (k, v.parse().unwrap())).collect();
        let newest = release.version == NEWEST.version;
        for (name, value) in ours {
            let changes = ["NCCL_MAJOR", "NCCL_MINOR", "NCCL_PATCH", "NCCL_VERSION_CODE"].contains(&name);
            match theirs.get(name) {
                Some(_) if changes && !newest => (),
                Some(&theirs) => assert_eq!(theirs, value, "{name} of {}", release.version),
                None => assert!(!newest, "{name} is not in the newest header"),
            }
        }
        assert_eq!(theirs["NCCL_VERSION_CODE"], i64::from(release.version.code()));
    }
}

#[test]
fn versions_are_packed_as_the_headers_macro_packs_them() {
    for release in RELEASES {
        let Some(path) = release.header() else { continue };
        let source = "#include <stdio.h>\n#include \"nccl.h\"\nint main(void) {\n\
            for (int x = 1; x < 5; x++) for (int y = 0; y < 100; y++) for (int z = 0; z < 100; z += 9)\n\
            printf(\"%d %d %d %d\\n\", x, y, z, NCCL_VERSION(x, y, z));\nreturn 0; }\n";
        for line in run_c(&path, source).lines() {
            let [x, y, z, code]: [i32; 4] = line.split(' ').map(|n| n.parse().unwrap()).collect::<Vec<_>>().try_into().unwrap();
            let version = Version::new(x as u16, y as u8, z as u8);
            assert_eq!(version.code(), code, "{line}");
            // Before 2.9 the code had two digits for patches and one for minor versions, which was enough.
            assert_eq!((version.major(), version.minor(), version.patch()), (x, y, z), "{line}");
        }
    }
}

#[test]
fn each_function_is_in_the_headers_since_the_release_that_the_table_names() {
    for release in RELEASES {
        let Some(path) = release.header() else { continue };
        let header = Header::read(&path);
        let theirs: BTreeSet<&str> = header.functions().into_iter().map(|(name, _)| name).collect();
        let ours: BTreeSet<&str> = FUNCTIONS.iter().filter(|(_, since)| *since <= release.version).map(|(name, _)| *name).collect();
        assert_eq!(theirs, ours, "{}", release.version);
        println!("NCCL {}: {} functions", release.version, theirs.len());
    }
}

/// The methods have the newest signatures, whatever library is loaded.
#[test]
fn signatures_are_the_same_in_all_releases() {
    let Some(newest) = NEWEST.header() else { return };
    let newest = Header::read(&newest);
    let newest: BTreeMap<&str, &str> = newest.functions().into_iter().collect();
    for release in RELEASES {
        let Some(path) = release.header() else { continue };
        let older = Header::read(&path);
        let again: String = older.functions().into_iter().fold(String::new(), |all, (name, _)| all + newest[name] + ";\n");
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("again.c");
        // C refuses to declare a function again with another type.
        std::fs::write(&file, format!("#include \"nccl.h\"\n{again}")).unwrap();
        output(cc().args(["-fsyntax-only", "-I"]).arg(path.parent().unwrap()).arg(&file));
    }
}
