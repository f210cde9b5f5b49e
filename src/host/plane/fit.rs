//! Finds the parameters of a model that agree best with what was measured.

/// Parameters from `start` on for which `error` is least, as far as steps along one parameter, or along two at once, find it. All are
/// positive and stay so; each may become a thousand times as large or as small, and no more. The same wherever the numbers are the same.
pub(super) fn fit<const N: usize>(start: [f64; N], error: impl Fn(&[f64; N]) -> f64) -> [f64; N] {
    /// The first step: by which factor; a round without a gain takes its root.
    const FIRST_STEP: f64 = 2.0;
    const LAST_STEP: f64 = 1.005;
    const FARTHEST: f64 = 1000.0;
    const ROUNDS: usize = 200;
    let (mut best, mut least, mut step) = (start, error(&start), FIRST_STEP);
    for _ in 0..ROUNDS {
        let before = least;
        for first in 0..N {
            for (second, factors) in (first..N).flat_map(|second| [[step, step], [step, 1.0 / step]].map(|factors| (second, factors))) {
                for [one, other] in [factors, factors.map(f64::recip)] {
                    let mut tried = best;
                    tried[first] *= one;
                    tried[second] *= if second == first { 1.0 } else { other };
                    for (parameter, from) in tried.iter_mut().zip(&start) {
                        *parameter = parameter.clamp(from / FARTHEST, from * FARTHEST);
                    }
                    let found = error(&tried);
                    if found < least {
                        (best, least) = (tried, found);
                    }
                }
            }
        }
        if least >= before * ENOUGH {
            step = step.sqrt();
        }
        if step < LAST_STEP {
            break;
        }
    }
    best
}

/// A round that leaves more than this of the error has gained nothing that matters with steps of its size.
const ENOUGH: f64 = 0.999;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_hidden_is_found() {
        let model = |at: f64, [latency, byte]: &[f64; 2]| latency + byte * at;
        let measured = [1.0, 100.0, 10_000.0].map(|at| (at, model(at, &[700.0, 0.3])));
        let error = |tried: &[f64; 2]| measured.iter().map(|(at, time)| (model(*at, tried) / time).ln().powi(2)).sum();
        let [latency, byte] = fit([100.0, 1.0], error);
        assert!((latency - 700.0).abs() < 15.0 && (byte - 0.3).abs() < 0.01, "{latency} {byte}");
    }

    #[test]
    fn errors_that_are_no_numbers_change_nothing() {
        assert_eq!(fit([1.0, 2.0], |_| f64::NAN), [1.0, 2.0]);
        assert_eq!(fit([1.0], |tried| -tried[0]), [1000.0]);
    }
}
