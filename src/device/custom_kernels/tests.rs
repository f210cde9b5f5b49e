#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use super::*;

#[test]
fn the_template_has_what_is_replaced_and_the_kernel_that_is_looked_up() {
    assert!(TEMPLATE.contains(EXPRESSION) && TEMPLATE.contains(&format!("\n{ENTRY}(")));
    for dtype in DType::ALL {
        assert!(TEMPLATE.contains(&format!(" user_{dtype};")), "{dtype}");
        let text = source("a + b", dtype).unwrap();
        assert!(text.contains("\na + b\n"), "the expression does not stand on a line of its own");
        let code: String = text.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
        assert!(!code.contains('@') && !code.contains("#include"), "{dtype}");
    }
}

#[test]
fn an_expression_that_is_none_gets_into_no_source() {
    assert!(source("a; b", DType::F32).unwrap_err().to_string().contains("\";\""));
}

#[test]
fn a_compiler_compiles_or_says_what_is_wrong() {
    let good = compile(&source("fabsf(b) > fabsf(a) ? b : a", DType::F32).unwrap(), (9, 0), "good");
    // What passes the check may still be nonsense.
    let bad = compile(&source("max(float)a", DType::F32).unwrap(), (9, 0), "max(float)a");
    // SAFETY: as in `compile`.
    if unsafe { nvrtc::sys::is_culib_present() } {
        let text = good.unwrap();
        assert!(text.contains(&format!(".entry {ENTRY}(")) && text.contains(".target sm_80"), "{text}");
        let text = bad.unwrap_err().to_string();
        assert!(text.contains("max(float)a") && text.contains("error"), "{text}");
    } else {
        for outcome in [good, bad] {
            let error = outcome.unwrap_err();
            assert!(error.is_unsupported(), "{error}");
            assert!(error.to_string().contains("libnvrtc.so") && error.to_string().contains("with_ptx"), "{error}");
        }
    }
}

#[test]
fn clones_and_equal_texts_are_one_op() {
    let expression = |text: &str| DeviceCode::Expression(text.into());
    let ptx = |image: &str, entry: &str| DeviceCode::Ptx { image: image.into(), entry: entry.into() };
    assert!(is_same(&expression("a + b"), &expression("a + b")));
    assert!(!is_same(&expression("a + b"), &expression("b + a")));
    assert!(is_same(&ptx("x", "y"), &ptx("x", "y").clone()));
    assert!(!is_same(&ptx("x", "y"), &ptx("x", "z")) && !is_same(&ptx("x", "y"), &expression("x")));
}
