//! Determines how many ranks a host starts.

use std::fmt;
use std::str::FromStr;

/// The largest accepted number of ranks.
const MOST: u16 = 4096;

/// A number of ranks, or what to count on this host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Count {
    Number(u16),
    Gpus,
    Processors,
    /// GPUs, or processors if there are no GPUs.
    Auto,
}

impl FromStr for Count {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "gpu" => Ok(Self::Gpus),
            "cpu" => Ok(Self::Processors),
            "auto" => Ok(Self::Auto),
            number => match number.parse() {
                Ok(number @ 1..=MOST) => Ok(Self::Number(number)),
                _ => Err(format!("expected gpu, cpu, auto, or a number from 1 to {MOST}")),
            },
        }
    }
}

/// Formats the count as on the command line.
impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => write!(f, "{number}"),
            Self::Gpus => f.write_str("gpu"),
            Self::Processors => f.write_str("cpu"),
            Self::Auto => f.write_str("auto"),
        }
    }
}

impl Count {
    /// Returns the number of ranks on this host.
    pub(crate) fn ranks(self) -> Result<usize, String> {
        match self {
            Self::Number(number) => Ok(number.into()),
            Self::Gpus => gpus(),
            Self::Processors => processors(),
            Self::Auto => gpus().or_else(|_| processors()),
        }
    }
}

fn gpus() -> Result<usize, String> {
    match collectives::device_count() {
        Ok(count @ 1..) => Ok(count),
        Ok(_) => Err("--nproc-per-node gpu: the driver finds no GPU; give a number".to_owned()),
        Err(error) => Err(format!("--nproc-per-node gpu: {error}")),
    }
}

fn processors() -> Result<usize, String> {
    let count = std::thread::available_parallelism().map_err(|error| format!("--nproc-per-node cpu: counting processors: {error}"))?;
    Ok(count.get().min(usize::from(MOST)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_numbers_or_names() {
        assert_eq!("7".parse(), Ok(Count::Number(7)));
        assert_eq!(["gpu", "cpu", "auto"].map(str::parse), [Ok(Count::Gpus), Ok(Count::Processors), Ok(Count::Auto)]);
        for wrong in ["", "0", "-1", "4097", "all", "GPU"] {
            assert!(wrong.parse::<Count>().is_err(), "{wrong}");
        }
        assert_eq!(Count::Number(7).ranks(), Ok(7));
        assert!(Count::Processors.ranks().unwrap() > 0 && Count::Auto.ranks().unwrap() > 0);
    }
}
