//! Custom expressions, checked before they are compiled: a custom op is safe Rust, so its expression must not access
//! memory.

use crate::error::Error;
use crate::error::Result;

/// The longest expression, in bytes, and the deepest nesting of parentheses: far below a compiler's limits.
const LONGEST: usize = 4096;
const DEEPEST: usize = 64;

/// Functions that only compute a value.
const FUNCTIONS: &[&str] = &[
    "abs",
    "llabs",
    "min",
    "max",
    "umin",
    "umax",
    "llmin",
    "llmax",
    "ullmin",
    "ullmax",
    "fabs",
    "fmin",
    "fmax",
    "fma",
    "sqrt",
    "rsqrt",
    "cbrt",
    "exp",
    "exp2",
    "exp10",
    "expm1",
    "log",
    "log2",
    "log10",
    "log1p",
    "pow",
    "sin",
    "cos",
    "tan",
    "asin",
    "acos",
    "atan",
    "atan2",
    "sinh",
    "cosh",
    "tanh",
    "erf",
    "erfc",
    "floor",
    "ceil",
    "round",
    "rint",
    "trunc",
    "fmod",
    "remainder",
    "fdim",
    "hypot",
    "copysign",
    "fabsf",
    "fminf",
    "fmaxf",
    "fmaf",
    "sqrtf",
    "rsqrtf",
    "cbrtf",
    "expf",
    "exp2f",
    "exp10f",
    "expm1f",
    "logf",
    "log2f",
    "log10f",
    "log1pf",
    "powf",
    "sinf",
    "cosf",
    "tanf",
    "asinf",
    "acosf",
    "atanf",
    "atan2f",
    "sinhf",
    "coshf",
    "tanhf",
    "erff",
    "erfcf",
    "floorf",
    "ceilf",
    "roundf",
    "rintf",
    "truncf",
    "fmodf",
    "remainderf",
    "fdimf",
    "hypotf",
    "copysignf",
    "isnan",
    "isinf",
    "isfinite",
    "signbit",
    "__popc",
    "__popcll",
    "__clz",
    "__clzll",
    "__ffs",
    "__ffsll",
    "__brev",
    "__brevll",
    "__mulhi",
    "__umulhi",
    "__mul64hi",
    "__umul64hi",
    "__float_as_int",
    "__float_as_uint",
    "__int_as_float",
    "__uint_as_float",
    "__double_as_longlong",
    "__longlong_as_double",
    "__saturatef",
];

/// Words that form arithmetic types, alone or together.
const TYPES: &[&str] = &["bool", "char", "short", "int", "long", "float", "double", "signed", "unsigned"];

/// Operators, longer ones first.
const OPERATORS: &[&str] =
    &["<<", ">>", "<=", ">=", "==", "!=", "&&", "||", "+", "-", "*", "/", "%", "&", "|", "^", "~", "!", "<", ">", "?", ":", ",", "(", ")"];

/// A token of an expression.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Token<'a> {
    Number(&'a str),
    Word(&'a str),
    Operator(&'a str),
}

impl<'a> Token<'a> {
    fn text(self) -> &'a str {
        match self {
            Token::Number(text) | Token::Word(text) | Token::Operator(text) => text,
        }
    }
}

/// The tokens that may come next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    /// A value, or a token that may precede a value.
    Operand,
    /// An operator between two values, or the end of the expression.
    Operator,
    /// The parenthesis before a function's arguments.
    Arguments,
    /// More words of a type's name, the end of a cast, or the parenthesis of a conversion.
    Type,
}

/// The purpose of an open parenthesis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Open {
    Group,
    Arguments,
}

/// Refuses everything except arithmetic on `a` and `b`: numbers, operators, parentheses, casts to arithmetic types, and
/// functions without effects.
///
/// # Errors
///
/// `InvalidArgument`, with the refused token.
pub(super) fn check(expression: &str) -> Result<()> {
    if expression.len() > LONGEST {
        return Err(refused(expression, &format!("it has {} bytes; the limit is {LONGEST}", expression.len())));
    }
    let mut checker = Checker { next: Next::Operand, open: Vec::new(), conditions: vec![0] };
    let blank = [' ', '\t', '\n'];
    let mut rest = expression.trim_start_matches(blank);
    while !rest.is_empty() {
        let token = token(rest).map_err(|piece| refused(expression, &format!("{piece:?} is not allowed")))?;
        checker.take(token).map_err(|reason| refused(expression, &format!("{:?} {reason}", token.text())))?;
        rest = rest[token.text().len()..].trim_start_matches(blank);
    }
    checker.end().map_err(|reason| refused(expression, reason))
}

fn refused(expression: &str, reason: &str) -> Error {
    let mut shown: String = expression.chars().take(200).collect();
    if shown.len() < expression.len() {
        shown.push('…');
    }
    let allowed =
        "an expression is arithmetic on a and b: numbers, operators, casts to arithmetic types, and functions such as fmaxf or __popc";
    Error::argument("CustomOp::with_expression", format!("{shown:?}: {reason}; {allowed}"))
}

/// Returns the first token of a text, or the offending character if the text does not begin with a token.
fn token(text: &str) -> std::result::Result<Token<'_>, &str> {
    let bytes = text.as_bytes();
    let is_word = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_';
    let starts_number = bytes[0].is_ascii_digit() || (bytes[0] == b'.' && bytes.get(1).is_some_and(u8::is_ascii_digit));
    if starts_number {
        let number = &text[..number_len(bytes)];
        return if is_number(number) { Ok(Token::Number(number)) } else { Err(number) };
    }
    if bytes[0].is_ascii_alphabetic() || bytes[0] == b'_' {
        let length = bytes.iter().position(|byte| !is_word(byte)).unwrap_or(bytes.len());
        return Ok(Token::Word(&text[..length]));
    }
    if let Some(operator) = OPERATORS.iter().find(|operator| text.starts_with(**operator)) {
        return Ok(Token::Operator(&text[..operator.len()]));
    }
    let length = text.chars().next().map_or(0, char::len_utf8);
    Err(&text[..length])
}

/// Returns the length of the number at the start of a text, as a preprocessor reads it.
fn number_len(bytes: &[u8]) -> usize {
    let mut length = 1;
    while let Some(byte) = bytes.get(length) {
        let is_sign = matches!(byte, b'+' | b'-') && matches!(bytes[length - 1], b'e' | b'E' | b'p' | b'P');
        if !(byte.is_ascii_alphanumeric() || *byte == b'_' || *byte == b'.' || is_sign) {
            break;
        }
        length += 1;
    }
    length
}

/// Whether the text is a decimal or hexadecimal number in C.
fn is_number(text: &str) -> bool {
    let lower = text.to_ascii_lowercase();
    let is_suffix = |suffix: &str| ["", "u", "l", "ul", "lu", "ll", "ull", "llu"].contains(&suffix);
    if let Some(digits) = lower.strip_prefix("0x") {
        let end = digits.find(|c: char| !c.is_ascii_hexdigit()).unwrap_or(digits.len());
        return end != 0 && is_suffix(&digits[end..]);
    }
    let end = lower.find(|c: char| !c.is_ascii_digit()).unwrap_or(lower.len());
    if end != 0 && is_suffix(&lower[end..]) {
        return true;
    }
    // A float: digits with a point or an exponent, perhaps an f. C accepts those that Rust accepts.
    let float = lower.strip_suffix('f').unwrap_or(&lower);
    float.bytes().all(|byte| byte.is_ascii_digit() || matches!(byte, b'.' | b'e' | b'+' | b'-'))
        && float.contains(['.', 'e'])
        && float.parse::<f64>().is_ok()
}

/// Checks an expression from left to right.
#[derive(Debug)]
struct Checker {
    next: Next,
    open: Vec<Open>,
    /// The number of `?` that wait for their `:`, outside all parentheses and inside each open one.
    conditions: Vec<usize>,
}

type Verdict = std::result::Result<(), &'static str>;

impl Checker {
    fn take(&mut self, token: Token<'_>) -> Verdict {
        match (self.next, token) {
            (Next::Arguments, Token::Operator("(")) => self.enter(Open::Arguments),
            (Next::Arguments, _) => Err("appears where the arguments of a function are expected"),
            (Next::Type, Token::Word(word)) if TYPES.contains(&word) => Ok(()),
            (Next::Type, Token::Operator("(")) => self.enter(Open::Group),
            (Next::Type, Token::Operator(")")) => {
                // A cast: its value comes next.
                self.open.pop().ok_or("closes a parenthesis that was not opened")?;
                self.conditions.pop();
                self.next = Next::Operand;
                Ok(())
            }
            (Next::Type, _) => Err("appears in a type: only casts to arithmetic types are allowed, no pointers"),
            (Next::Operand, token) => self.operand(token),
            (Next::Operator, Token::Operator(operator)) => self.operator(operator),
            (Next::Operator, _) => Err("appears where an operator is expected"),
        }
    }

    fn operand(&mut self, token: Token<'_>) -> Verdict {
        self.next = match token {
            Token::Number(_) | Token::Word("a" | "b" | "true" | "false") => Next::Operator,
            Token::Word(word) if TYPES.contains(&word) => Next::Type,
            Token::Word(word) if FUNCTIONS.contains(&word) => Next::Arguments,
            Token::Word(_) => return Err("is not a known value, type or function"),
            Token::Operator("+" | "-" | "!" | "~") => Next::Operand,
            Token::Operator("(") => return self.enter(Open::Group),
            Token::Operator(_) => return Err("appears where a value is expected"),
        };
        Ok(())
    }

    fn operator(&mut self, operator: &str) -> Verdict {
        let waiting = self.conditions.last_mut().ok_or("closes a parenthesis that was not opened")?;
        match operator {
            "(" | "!" | "~" => return Err("appears where an operator between two values is expected"),
            ")" => {
                if *waiting != 0 {
                    return Err("closes a parenthesis in which a condition has no ':'");
                }
                self.conditions.pop();
                return self.open.pop().map(|_| ()).ok_or("closes a parenthesis that was not opened");
            }
            "," if self.open.last() != Some(&Open::Arguments) => return Err("appears outside of a function's arguments"),
            "?" => *waiting += 1,
            ":" => *waiting = waiting.checked_sub(1).ok_or("has no '?' before it")?,
            _ => {}
        }
        self.next = Next::Operand;
        Ok(())
    }

    fn enter(&mut self, open: Open) -> Verdict {
        if self.open.len() >= DEEPEST {
            return Err("nests parentheses too deeply");
        }
        self.open.push(open);
        self.conditions.push(0);
        self.next = Next::Operand;
        Ok(())
    }

    fn end(&self) -> std::result::Result<(), &'static str> {
        match self.next {
            _ if !self.open.is_empty() => Err("a parenthesis is left open"),
            Next::Operator if self.conditions.iter().all(|waiting| *waiting == 0) => Ok(()),
            Next::Operator => Err("a condition has no ':'"),
            _ => Err("it ends where a value is expected"),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    #[test]
    fn arithmetic_is_let_through() {
        for expression in [
            "a",
            "a + b",
            " a\t*\n b ",
            "fabsf(b) > fabsf(a) ? b : a",
            "a > b ? a : a == b ? (a + b) / 2 : b",
            "(float)a * 0.5f + (double) b",
            "(unsigned int)a >> 3 | b << 0x1Fu",
            "max(min(a, b), (a ^ b) & ~(a - -b))",
            "unsigned(a) % 7ull",
            "-a + +b - !b",
            "a && b || !(a != b)",
            ".5f * a + 1.5e-3f * b + 1e10 + 2.",
            "fmaf(a, b, 1.0f)",
            "__popc((unsigned)a ^ (unsigned)b)",
            "max(a ? b : 1, b)",
            "true ? a : b",
        ] {
            check(expression).unwrap_or_else(|error| panic!("{error}"));
        }
    }

    #[test]
    fn everything_else_is_refused_by_name() {
        for (expression, piece) in [
            ("", "ends"),
            ("a +", "ends"),
            ("a b", "\"b\""),
            ("*a", "\"*\""),
            ("a + *b", "\"*\""),
            ("&a", "\"&\""),
            ("a + &b", "\"&\""),
            ("a && &b", "\"&\""),
            ("&&a", "\"&&\""),
            ("a & & b", "\"&\""),
            ("(int*)a", "\"*\""),
            ("(int * const)a", "\"*\""),
            ("(float &)a", "\"&\""),
            ("(void)a", "\"void\""),
            ("inputs", "\"inputs\""),
            ("output", "\"output\""),
            ("a; b", "\";\""),
            ("a) + (b", "\")\""),
            ("a)); evil((b", "\")\""),
            ("(a", "open"),
            ("{a}", "\"{\""),
            ("a[0]", "\"[\""),
            ("a->b", "\">\""),
            ("a.b", "\".\""),
            ("a ? b", "no ':'"),
            ("a : b", "\":\""),
            ("(a ? b) : a", "\")\""),
            ("std::max(a, b)", "\"std\""),
            ("a = b", "\"=\""),
            ("a += b", "\"=\""),
            ("a, b", "\",\""),
            ("(a, b)", "\",\""),
            ("asm(\"trap;\")", "\"asm\""),
            ("__trap()", "\"__trap\""),
            ("sizeof(a)", "\"sizeof\""),
            ("bitand a", "\"bitand\""),
            ("min<int>(a, b)", "\"<\""),
            ("min", "ends"),
            ("max(,a)", "\",\""),
            ("a //", "\"/\""),
            ("a /* b */", "\"*\""),
            ("a \\ b", "\"\\\\\""),
            ("#define a b", "\"#\""),
            ("'a'", "\"'\""),
            ("\"a\"", "\"\\\"\""),
            ("a %: b", "\":\""),
            ("a <: b", "\":\""),
            ("a ??= b", "\"?\""),
            ("1a", "\"1a\""),
            ("1_km", "\"1_km\""),
            ("0x", "\"0x\""),
            ("0x1p3", "\"0x1p3\""),
            ("5f", "\"5f\""),
            ("1..2", "\"1..2\""),
            ("a + b\0", "\\0"),
            ("a \u{a0}+ b", "a0"),
            ("é", "é"),
            ("@EXPRESSION@", "@"),
        ] {
            let error = check(expression).unwrap_err().to_string();
            assert!(error.contains(piece), "{expression:?}: {error}");
        }
    }

    #[test]
    fn what_could_upset_a_compiler_is_refused() {
        let nested = |depth: usize| format!("{}a{}", "(".repeat(depth), ")".repeat(depth));
        assert!(check(&nested(DEEPEST)).is_ok());
        assert!(check(&nested(DEEPEST + 1)).is_err());
        assert!(check(&"a + ".repeat(LONGEST)).is_err());
    }
}
