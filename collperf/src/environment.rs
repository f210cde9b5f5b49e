//! The variables of nccl-tests. None is ignored: values that are not supported are refused.

use std::path::Path;

use crate::failure::Failure;
use crate::subset::Subset;
use crate::traffic::Traffic;

/// The values of these variables.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Environment {
    /// The mean bus bandwidth to reach, in 10^9 bytes per second.
    pub(crate) least_busbw: Option<f64>,
    /// How ranks are divided into groups that run at the same time.
    pub(crate) subset: Option<Subset>,
    /// The device of the first rank of a process.
    pub(crate) first_device: Option<usize>,
    /// The blocks of `all_to_all_v`, if they differ from this program's own.
    pub(crate) traffic: Option<Traffic>,
    /// Whether to print the bytes and bandwidths of each rank in `all_to_all_v`.
    pub(crate) traffic_summary: bool,
}

impl Environment {
    /// Reads the variables through `read`; an empty one counts as unset.
    pub(crate) fn read(read: &dyn Fn(&str) -> Option<String>) -> Result<Self, Failure> {
        let text = |name: &str| read(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty());
        Ok(Self {
            least_busbw: text("NCCL_TESTS_MIN_BW").map(|value| bandwidth(&value)).transpose()?,
            subset: subset(text("NCCL_TESTS_SPLIT"), text("NCCL_TESTS_SPLIT_MASK"))?,
            first_device: text("NCCL_TESTS_DEVICE").map(|value| device(&value)).transpose()?.flatten(),
            traffic: traffic(&text)?,
            traffic_summary: text("NCCL_TESTS_ALLTOALLV_PRINT_SUMMARY").map(|value| switch(&value)).transpose()?.unwrap_or(false),
        })
    }
}

/// Returns the blocks of `all_to_all_v` that the variables ask for.
fn traffic(text: &dyn Fn(&str) -> Option<String>) -> Result<Option<Traffic>, Failure> {
    let [file, scale, spread] = ["MATRIX_FILE", "MATRIX_SCALE", "SPREAD"].map(|name| text(&format!("NCCL_TESTS_ALLTOALLV_{name}")));
    let number = |name: &str, value: &str, most: f64| {
        let number = value.parse::<f64>().ok().filter(|number| (0.0..=most).contains(number));
        number.ok_or_else(|| Failure::usage(format!("NCCL_TESTS_ALLTOALLV_{name}={value:?}: expected a number from 0 to {most}")))
    };
    let factor = scale.as_deref().map(|scale| number("MATRIX_SCALE", scale, 1e12)).transpose()?;
    let spread = spread.as_deref().map(|spread| number("SPREAD", spread, 1.0)).transpose()?;
    match (file, factor, spread) {
        (Some(_), _, Some(_)) => {
            Err(Failure::usage("NCCL_TESTS_ALLTOALLV_SPREAD: NCCL_TESTS_ALLTOALLV_MATRIX_FILE is also set; unset one of the two variables"))
        }
        (Some(file), factor, None) => Traffic::read(Path::new(&file), factor.unwrap_or(1.0)).map(Some),
        (None, Some(_), _) => {
            Err(Failure::usage("NCCL_TESTS_ALLTOALLV_MATRIX_SCALE: there is no matrix to scale; set NCCL_TESTS_ALLTOALLV_MATRIX_FILE too"))
        }
        (None, None, spread) => Ok(spread.map(Traffic::Spread)),
    }
}

fn switch(text: &str) -> Result<bool, Failure> {
    let number = text.parse::<i64>().map(|number| number != 0);
    number.map_err(|_| Failure::usage(format!("NCCL_TESTS_ALLTOALLV_PRINT_SUMMARY={text:?}: expected 0 or 1")))
}

fn bandwidth(text: &str) -> Result<f64, Failure> {
    let bandwidth = text.parse::<f64>().ok().filter(|bandwidth| *bandwidth >= 0.0);
    bandwidth.ok_or_else(|| Failure::usage(format!("NCCL_TESTS_MIN_BW={text:?}: expected a bandwidth in GB/s")))
}

fn subset(split: Option<String>, mask: Option<String>) -> Result<Option<Subset>, Failure> {
    let wrong = |name: &str, value: &str, reason: String| Failure::usage(format!("{name}={value:?}: {reason}"));
    match (split, mask) {
        (None, None) => Ok(None),
        (Some(split), None) => Subset::parse(&split).map(Some).map_err(|reason| wrong("NCCL_TESTS_SPLIT", &split, reason)),
        (None, Some(mask)) => Subset::masked(&mask).map(Some).map_err(|reason| wrong("NCCL_TESTS_SPLIT_MASK", &mask, reason)),
        (Some(_), Some(mask)) => {
            Err(wrong("NCCL_TESTS_SPLIT_MASK", &mask, "NCCL_TESTS_SPLIT is also set; unset one of the two variables".to_owned()))
        }
    }
}

/// Reads a device's number; -1 means no particular one.
fn device(text: &str) -> Result<Option<usize>, Failure> {
    let number = if text == "-1" { Some(None) } else { text.parse::<u16>().ok().map(|number| Some(number.into())) };
    number.ok_or_else(|| Failure::usage(format!("NCCL_TESTS_DEVICE={text:?}: expected the number of a device, from 0")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Environment, String> {
        let variable = |name: &str| variables.iter().find(|(other, _)| *other == name).map(|(_, value)| (*value).to_owned());
        Environment::read(&variable).map_err(|failure| {
            assert_eq!(failure.code, 6);
            failure.message
        })
    }

    #[test]
    fn what_is_set_is_understood() {
        assert_eq!(read(&[("NCCL_TESTS_SPLIT", " "), ("NCCL_TESTS_DEVICE", "")]), Ok(Environment::default()));
        let all = read(&[("NCCL_TESTS_MIN_BW", "2.5"), ("NCCL_TESTS_DEVICE", "3"), ("NCCL_TESTS_ALLTOALLV_SPREAD", "0")]).unwrap();
        assert_eq!((all.least_busbw, all.first_device), (Some(2.5), Some(3)));
        assert_eq!((all.traffic, all.traffic_summary), (Some(Traffic::Spread(0.0)), false));
        assert!(read(&[("NCCL_TESTS_ALLTOALLV_PRINT_SUMMARY", "1")]).unwrap().traffic_summary);
        assert_eq!(read(&[("NCCL_TESTS_DEVICE", "-1")]), Ok(Environment::default()));
        assert_eq!(read(&[("NCCL_TESTS_SPLIT_MASK", "7")]).unwrap().subset, read(&[("NCCL_TESTS_SPLIT", "& 0x7")]).unwrap().subset);
    }

    #[test]
    fn what_is_not_understood_is_an_error() {
        for (name, value) in [
            ("NCCL_TESTS_MIN_BW", "x"),
            ("NCCL_TESTS_MIN_BW", "-1"),
            ("NCCL_TESTS_MIN_BW", "NaN"),
            ("NCCL_TESTS_DEVICE", "two"),
            ("NCCL_TESTS_DEVICE", "-2"),
            ("NCCL_TESTS_DEVICE", "70000"),
            ("NCCL_TESTS_SPLIT", "XOR 1"),
            ("NCCL_TESTS_ALLTOALLV_SPREAD", "1.5"),
            ("NCCL_TESTS_ALLTOALLV_MATRIX_SCALE", "-1"),
            ("NCCL_TESTS_ALLTOALLV_PRINT_SUMMARY", "yes"),
            ("NCCL_TESTS_SPLIT_MASK", "g"),
        ] {
            let said = read(&[(name, value)]).unwrap_err();
            assert!(said.starts_with(&format!("{name}={value:?}: ")), "{said}");
        }
        assert!(read(&[("NCCL_TESTS_SPLIT", "MOD 2"), ("NCCL_TESTS_SPLIT_MASK", "1")]).is_err());
        assert!(read(&[("NCCL_TESTS_ALLTOALLV_MATRIX_SCALE", "2")]).unwrap_err().contains("no matrix to scale"));
        let both = [("NCCL_TESTS_ALLTOALLV_MATRIX_FILE", "x"), ("NCCL_TESTS_ALLTOALLV_SPREAD", "1")];
        assert!(read(&both).unwrap_err().contains("unset one of the two"));
    }
}
