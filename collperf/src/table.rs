//! The table that nccl-tests prints, in exactly the same format, so that programs that read its output can read ours.

use std::fmt::Write as _;

use crate::row::{Forecast, Half, Row};
use crate::statistics::Spread;

/// The optional columns.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Columns {
    /// Least, largest and 99th percentile of single calls, and their variation.
    pub(crate) per_iteration: bool,
    /// The time of day.
    pub(crate) timestamps: bool,
    /// Whether the times are those to issue calls.
    pub(crate) issue_time: bool,
    /// The algorithm of a call, its predicted time, and the ratio of predicted to measured time.
    pub(crate) predictions: bool,
}

/// Returns the three lines above the rows.
pub(crate) fn header(columns: Columns) -> String {
    let (stamp, format, pad) = if columns.timestamps { ("timestamp", "%Y-%m-%d %H:%M:%S", 19) } else { ("", "", 0) };
    let fixed = |names: [&str; 5]| format!("# {:>10}  {:>12}  {:>8}  {:>6}  {:>6}", names[0], names[1], names[2], names[3], names[4]);
    let half = |names: [&str; 11]| {
        let mut text = format!("  {:>7}  {:>6}  {:>6}  {:>6}", names[0], names[1], names[2], names[3]);
        if columns.per_iteration {
            text += &format!("  {:>7}  {:>7}  {:>7}  {:>7}", names[4], names[5], names[6], names[7]);
        }
        if columns.predictions {
            text += &format!("  {:>14}  {:>9}  {:>5}", names[8], names[9], names[10]);
        }
        text
    };
    let line = |names, both, stamp| format!("{}{}{} {stamp:>pad$}\n", fixed(names), half(both), half(both));
    let band = if columns.per_iteration {
        "              out-of-place (+ per-iteration)                                in-place (+ per-iteration)"
    } else {
        "           out-of-place                       in-place          "
    };
    let mut text = format!("#\n{}{band}\n", fixed([""; 5]));
    let time = if columns.issue_time { "cputime" } else { "time" };
    let names = [time, "algbw", "busbw", "#wrong", "i_min", "i_max", "i_p99", "i_cv%", "algorithm", "predicted", "ratio"];
    text += &line(["size", "count", "type", "redop", "root"], names, stamp);
    let units = ["(us)", "(GB/s)", "(GB/s)", "", "(us)", "(us)", "(us)", "(%)", "", "(us)", ""];
    text += &line(["(B)", "(elements)", "", "", ""], units, format);
    text
}

/// Returns one row. `timestamp` is included if there is such a column.
pub(crate) fn row(row: &Row, columns: Columns, timestamp: &str) -> String {
    let root = row.root.map_or(-1, |root| root as i64);
    let mut text = format!("{:>12}  {:>12}  {:>8}  {:>6}  {root:>6}", row.bytes, row.count, row.type_name(), row.op_name());
    for half in [&row.out_of_place, &row.in_place] {
        text += &half.as_ref().map_or_else(|| absent(columns), |half| present(half, columns));
    }
    if columns.timestamps {
        let _ = write!(text, "{timestamp:>21}");
    }
    text.push('\n');
    text
}

/// Returns the columns of one half.
fn present(half: &Half, columns: Columns) -> String {
    let mut text = format!("  {}  {}  {}", fitted(half.time_us, 7), fitted(half.algbw, 6), fitted(half.busbw, 6));
    match half.wrong {
        Some(wrong) => {
            let _ = write!(text, "  {:>6}", general(wrong as f64));
        }
        None => text += "     N/A",
    }
    if columns.per_iteration {
        text += &half.spread.as_ref().map_or_else(|| "      N/A".repeat(4), spread);
    }
    if columns.predictions {
        text += &half.prediction.as_ref().map_or_else(unpredicted, |prediction| {
            let Forecast { algorithm, time_us } = prediction;
            format!("  {algorithm:>14}  {}  {}", fitted(*time_us, 9), fitted(half.ratio().unwrap_or(f64::NAN), 5))
        });
    }
    text
}

/// Returns the columns of a missing prediction.
fn unpredicted() -> String {
    format!("  {0:>14}  {0:>9}  {0:>5}", "N/A")
}

fn spread(spread: &Spread) -> String {
    [spread.min, spread.max, spread.p99, spread.variation_percent()].iter().map(|value| format!("  {}", fitted(*value, 7))).collect()
}

/// Returns the columns of a half that this collective does not have.
fn absent(columns: Columns) -> String {
    let usual = format!("  {0:>7}  {0:>6}  {0:>6}  {0:>6}", "N/A");
    let more = if columns.per_iteration { "      N/A".repeat(4) } else { String::new() };
    usual + &more + &if columns.predictions { unpredicted() } else { String::new() }
}

/// Returns the lines below the rows: failed checks, and the mean bus bandwidth with, if a floor was given, whether it
/// was reached.
pub(crate) fn footer(name: &str, failed_checks: usize, mean_busbw: f64, reached: Option<bool>) -> String {
    let verdict = |good| if good { "OK" } else { "FAILED" };
    format!(
        "# {:<20} : {failed_checks} {}\n# {:<20} : {} {}\n#\n# Collective test concluded: {name}\n#\n\n",
        "Out of bounds values",
        verdict(failed_checks == 0),
        "Avg bus bandwidth",
        general(mean_busbw),
        reached.map_or("", verdict),
    )
}

/// Formats a number with two decimals in this width; with fewer if it does not fit, and finally with an exponent.
fn fitted(value: f64, width: usize) -> String {
    for decimals in [2, 1, 0] {
        let text = format!("{value:>width$.decimals$}");
        if text.len() <= width {
            return text;
        }
    }
    format!("{:>width$}", with_exponent(value, usize::from(width >= 7)))
}

/// Formats a number as C does with `%e`: `1.2e+08`.
fn with_exponent(value: f64, decimals: usize) -> String {
    let text = format!("{value:.decimals$e}");
    match text.split_once('e') {
        Some((mantissa, exponent)) => {
            let (sign, digits) = exponent.strip_prefix('-').map_or(('+', exponent), |digits| ('-', digits));
            format!("{mantissa}e{sign}{digits:0>2}")
        }
        None => text,
    }
}

/// Formats a number as C does with `%g`: at most six digits, without zeros at the end.
pub(crate) fn general(value: f64) -> String {
    if value == 0.0 || !value.is_finite() {
        return format!("{value}");
    }
    let scientific = with_exponent(value, 5);
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let trimmed =
        |digits: &str| if digits.contains('.') { digits.trim_end_matches('0').trim_end_matches('.').to_owned() } else { digits.to_owned() };
    match exponent.parse::<i32>() {
        Ok(power @ -4..6) => trimmed(&format!("{value:.*}", (5 - power) as usize)),
        _ => format!("{}e{exponent}", trimmed(mantissa)),
    }
}

#[cfg(test)]
mod tests {
    use collectives::{DType, ReduceOp};

    use super::*;
    use crate::collective::Collective;

    fn half(time_us: f64, algbw: f64, busbw: f64, wrong: Option<u64>) -> Option<Half> {
        Some(Half { time_us, algbw, busbw, wrong, spread: None, samples: vec![], prediction: None })
    }

    fn example() -> Row {
        Row {
            collective: Collective::AllReduce,
            op: Some(ReduceOp::Sum),
            dtype: Some(DType::F32),
            root: None,
            ranks: 2,
            count: 33_554_432,
            bytes: 134_217_728,
            iterations: 20,
            out_of_place: half(614.93, 218.26, 381.96, Some(0)),
            in_place: half(12345.67, 1234.56, 12345.6, None),
        }
    }

    #[test]
    fn rows_are_those_of_nccl_tests() {
        let line = row(&example(), Columns::default(), "");
        assert_eq!(
            line,
            "   134217728      33554432     float     sum      -1   614.93  218.26  381.96       0  12345.7  1234.6   12346     N/A\n"
        );
        let rooted = Row { root: Some(3), op: None, dtype: Some(DType::Bf16), bytes: 8, count: 4, in_place: None, ..example() };
        let line = row(&rooted, Columns::default(), "");
        assert_eq!(
            line,
            "           8             4  bfloat16    none       3   614.93  218.26  381.96       0      N/A     N/A     N/A     N/A\n"
        );
    }

    #[test]
    fn the_header_is_that_of_nccl_tests() {
        let expected = concat!(
            "#\n",
            "#                                                              out-of-place                       in-place          \n",
            "#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong \n",
            "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)         \n",
        );
        assert_eq!(header(Columns::default()), expected);
    }

    #[test]
    fn more_columns_line_up() {
        let spread = Spread::of(&[1.0, 2.0, 3.0]);
        let with = |half: Option<Half>| half.map(|half| Half { spread: spread.clone(), ..half });
        let row_with = Row { out_of_place: with(example().out_of_place), in_place: None, ..example() };
        let columns = Columns { per_iteration: true, timestamps: true, ..Columns::default() };
        let line = row(&row_with, columns, "2026-01-02 03:04:05");
        assert!(line.contains("       0     1.00     3.00     3.00    40.82      N/A"), "{line}");
        let names = header(columns).lines().nth(2).unwrap().to_owned();
        // nccl-tests' own heading of this column is one narrower than the column.
        assert_eq!(line.trim_end().len(), names.len() + 1);
        assert!(names.ends_with("   i_cv%           timestamp"), "{names}");
    }

    #[test]
    fn the_footer_is_that_of_nccl_tests() {
        let expected = concat!(
            "# Out of bounds values : 0 OK\n",
            "# Avg bus bandwidth    : 41.5931 \n",
            "#\n",
            "# Collective test concluded: all_reduce_perf\n",
            "#\n",
            "\n",
        );
        assert_eq!(footer("all_reduce_perf", 0, 41.593_14, None), expected);
        assert!(footer("x", 2, 0.0, Some(false)).starts_with("# Out of bounds values : 2 FAILED\n# Avg bus bandwidth    : 0 FAILED\n"));
    }

    #[test]
    fn numbers_stay_in_their_width() {
        let cases = [(0.0, "   0.00"), (9999.99, "9999.99"), (99999.94, "99999.9"), (99999.99, " 100000"), (1.25e8, "1.2e+08")];
        for (value, text) in cases {
            assert_eq!(fitted(value, 7), text);
        }
        let cases = [(1234.56, "1234.6"), (123_456.0, "123456"), (12_345_678.0, " 1e+07"), (f64::INFINITY, "   inf")];
        for (value, text) in cases {
            assert_eq!(fitted(value, 6), text);
        }
    }

    #[test]
    fn numbers_are_written_as_c_does() {
        let cases = [
            (0.0, "0"),
            (1.0, "1"),
            (41.5931, "41.5931"),
            (0.5, "0.5"),
            (123456.0, "123456"),
            (999_999.5, "1e+06"),
            (1_048_576.0, "1.04858e+06"),
        ];
        for (value, text) in cases {
            assert_eq!(general(value), text);
        }
        assert_eq!(general(0.000_123_456_7), "0.000123457");
        assert_eq!(general(0.000_012_345_67), "1.23457e-05");
    }
}
