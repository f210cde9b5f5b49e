//! Logarithmic axes and their ticks.

use crate::sizes::human;
use crate::table::general;

/// A logarithmic scale from one coordinate to another.
#[derive(Debug, Clone, Copy)]
pub(super) struct Axis {
    least: f64,
    most: f64,
    from: f64,
    to: f64,
}

/// A place on an axis and its label, which is empty for finer lines.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Tick {
    pub(super) at: f64,
    pub(super) label: String,
}

impl Axis {
    /// Returns an axis for all of these (positive) values, with a small margin; `None` if there are none.
    pub(super) fn of(values: impl Iterator<Item = f64>, from: f64, to: f64) -> Option<Self> {
        let (least, most) = values.fold((f64::INFINITY, 0.0), |(least, most), value| (f64::min(least, value), f64::max(most, value)));
        // A single value gets a range around it.
        let room = if most > least * 4.0 { (most / least).powf(0.04) } else { 2.0 };
        (least <= most).then_some(Self { least: least / room, most: most * room, from, to })
    }

    /// Returns the coordinate of a value.
    pub(super) fn place(&self, value: f64) -> f64 {
        self.from + (self.to - self.from) * (value / self.least).ln() / (self.most / self.least).ln()
    }

    /// Returns ticks at powers of two, labelled with sizes in bytes.
    pub(super) fn sizes(&self) -> Vec<Tick> {
        let (first, last) = (self.least.log2().ceil() as i32, self.most.log2().floor() as i32);
        let step = [1, 2, 4, 5, 10].into_iter().find(|step| (last - first) / step < 8).unwrap_or(20);
        let powers = (first..=last).filter(|power| *power >= 0 && power % step == 0);
        powers.map(|power| Tick { at: self.place(2.0_f64.powi(power)), label: human(1 << power.min(62)) }).collect()
    }

    /// Returns ticks at powers of ten, and finer lines between them, which have labels if there are few decades.
    pub(super) fn decades(&self) -> Vec<Tick> {
        let (first, last) = (self.least.log10().floor() as i32, self.most.log10().ceil() as i32);
        let decades = self.most.log10() - self.least.log10();
        let mut ticks = Vec::new();
        for power in first..=last {
            for digit in 1..=9 {
                let value = f64::from(digit) * 10.0_f64.powi(power);
                if value < self.least || value > self.most {
                    continue;
                }
                let is_labelled = digit == 1 || decades < 3.0 && matches!(digit, 2 | 5);
                let label = if is_labelled { plain(value) } else { String::new() };
                ticks.push(Tick { at: self.place(value), label });
            }
        }
        ticks
    }
}

/// Formats a tick's value, with a separator between thousands.
fn plain(value: f64) -> String {
    let text = general(value);
    match text.strip_suffix("000") {
        Some(thousands) if !text.contains(['e', '.']) => format!("{thousands},000"),
        _ => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(ticks: &[Tick]) -> Vec<&str> {
        ticks.iter().map(|tick| tick.label.as_str()).filter(|label| !label.is_empty()).collect()
    }

    #[test]
    fn values_lie_between_the_ends() {
        let axis = Axis::of([1.0, 1e6].into_iter(), 0.0, 100.0).unwrap();
        assert!(axis.place(1.0) > 0.0 && axis.place(1e6) < 100.0);
        assert!((axis.place(1e3) - 50.0).abs() < 1e-9);
        let upwards = Axis::of([1.0, 100.0].into_iter(), 400.0, 0.0).unwrap();
        assert!(upwards.place(1.0) > upwards.place(100.0));
    }

    #[test]
    fn ticks_are_few_and_round() {
        let sizes = Axis::of([8.0, f64::from(128 << 20)].into_iter(), 0.0, 1.0).unwrap().sizes();
        assert_eq!(labels(&sizes), ["16 B", "256 B", "4 KiB", "64 KiB", "1 MiB", "16 MiB"]);
        let decades = Axis::of([0.5, 20_000.0].into_iter(), 0.0, 1.0).unwrap().decades();
        assert_eq!(labels(&decades), ["1", "10", "100", "1,000", "10,000"]);
        let few = Axis::of([1.0, 30.0].into_iter(), 0.0, 1.0).unwrap().decades();
        assert_eq!(labels(&few), ["1", "2", "5", "10", "20"]);
    }

    #[test]
    fn odd_ranges_have_axes() {
        assert!(Axis::of(std::iter::empty(), 0.0, 1.0).is_none());
        let one = Axis::of([7.0].into_iter(), 0.0, 1.0).unwrap();
        assert!((one.place(7.0) - 0.5).abs() < 1e-9 && !labels(&one.sizes()).is_empty());
    }
}
