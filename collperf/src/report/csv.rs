//! Results as comma-separated values: one line for each half of a row. Fields are numbers and our own names, which
//! contain neither commas nor quotes, so none is quoted. The csv crate reads what other programs wrote
//! (`compare/peers.rs`).

use collectives::DType;

use crate::row::{Forecast, Half, Row};

/// The columns of sampled cells, the same as those of the drivers of other libraries with which ours is compared.
pub(crate) const CELL_HEADER: &str = "peer,transport,collective,op,dtype,nranks,bytes,iters,lat_min_us,lat_p50_us,algbw_GBps\n";

/// The columns of a sweep.
pub(crate) const SWEEP_HEADER: &str = "collective,op,dtype,root,ranks,transport,bytes,count,place,iters,time_us,min_us,p50_us,p95_us,p99_us,max_us,algbw_GBps,busbw_GBps,wrong\n";

/// Further columns of both forms if calls are predicted.
pub(crate) const PREDICTION_HEADER: &str = ",algorithm,predicted_us,ratio";

/// Returns the fields under [`PREDICTION_HEADER`], if wanted; they are empty for a call without a prediction.
fn prediction(half: &Half, wanted: bool) -> String {
    match half.prediction {
        _ if !wanted => String::new(),
        Some(Forecast { algorithm, time_us }) => {
            format!(",{algorithm},{time_us:.3},{}", half.ratio().map_or(String::new(), |ratio| format!("{ratio:.3}")))
        }
        None => ",,,".to_owned(),
    }
}

/// Returns a header line, with the columns of predictions if wanted.
pub(crate) fn header(line: &str, predictions: bool) -> String {
    let more = if predictions { PREDICTION_HEADER } else { "" };
    format!("{}{more}\n", line.trim_end())
}

/// Formats a sampled cell. An all-reduce with one buffer has its own op.
pub(crate) fn cell(row: &Row, transport: &str, predictions: bool) -> String {
    let line = |(half, in_place): (&Half, bool)| {
        let op = if in_place && row.op.is_some() { format!("{}_inplace", row.op_name()) } else { row.op_name().to_owned() };
        let least = half.spread.as_ref().map_or(half.time_us, |spread| spread.min);
        format!(
            "ours,{transport},{},{op},{},{},{},{},{least:.3},{:.3},{:.4}{}\n",
            row.collective,
            dtype(row),
            row.ranks,
            row.bytes,
            row.iterations,
            half.time_us,
            half.algbw,
            prediction(half, predictions)
        )
    };
    row.halves().map(line).collect()
}

/// Formats a row of a sweep.
pub(crate) fn sweep(row: &Row, transport: &str, predictions: bool) -> String {
    let line = |(half, in_place): (&Half, bool)| {
        let root = row.root.map_or(String::new(), |root| root.to_string());
        let place = if in_place { "in" } else { "out" };
        let spread = half.spread.as_ref().map_or(",,,,".to_owned(), |spread| {
            let figures = [spread.min, spread.p50, spread.p95, spread.p99, spread.max];
            figures.map(|figure| format!("{figure:.3}")).join(",")
        });
        let wrong = half.wrong.map_or(String::new(), |wrong| wrong.to_string());
        format!(
            "{},{},{},{root},{},{transport},{},{},{place},{},{:.3},{spread},{:.4},{:.4},{wrong}{}\n",
            row.collective,
            row.op_name(),
            dtype(row),
            row.ranks,
            row.bytes,
            row.count,
            row.iterations,
            half.time_us,
            half.algbw,
            half.busbw,
            prediction(half, predictions)
        )
    };
    row.halves().map(line).collect()
}

fn dtype(row: &Row) -> &'static str {
    row.dtype.map_or("none", DType::name)
}

#[cfg(test)]
mod tests {
    use collectives::ReduceOp;

    use super::*;
    use crate::collective::Collective;
    use crate::statistics::Spread;

    fn row() -> Row {
        let half = |time_us: f64| {
            let spread = Spread::of(&[time_us - 1.0, time_us, time_us]);
            Some(Half { spread, ..Half::new(Collective::AllReduce, 2, 1024, time_us) })
        };
        Row {
            collective: Collective::AllReduce,
            op: Some(ReduceOp::Sum),
            dtype: Some(DType::F32),
            root: None,
            ranks: 2,
            count: 256,
            bytes: 1024,
            iterations: 400,
            out_of_place: half(2.0),
            in_place: half(4.0),
        }
    }

    #[test]
    fn cells_are_those_of_the_peers_drivers() {
        let expected = "ours,shm,all_reduce,sum,f32,2,1024,400,1.000,2.000,0.5120\nours,shm,all_reduce,sum_inplace,f32,2,1024,400,3.000,4.000,0.2560\n";
        assert_eq!(cell(&row(), "shm", false), expected);
        let broadcast = Row { collective: Collective::Broadcast, op: None, out_of_place: None, ..row() };
        assert_eq!(cell(&broadcast, "tcp", false), "ours,tcp,broadcast,none,f32,2,1024,400,3.000,4.000,0.2560\n");
        let barrier = Row { collective: Collective::Barrier, dtype: None, op: None, bytes: 0, in_place: None, ..row() };
        assert!(cell(&barrier, "tcp", false).starts_with("ours,tcp,barrier,none,none,2,0,"));
    }

    #[test]
    fn lines_have_as_many_fields_as_the_header() {
        for (header, lines) in [(CELL_HEADER, cell(&row(), "shm", false)), (SWEEP_HEADER, sweep(&row(), "shm", false))] {
            for line in lines.lines() {
                assert_eq!(line.split(',').count(), header.trim_end().split(',').count(), "{line}");
            }
        }
        let bare = Row { in_place: None, out_of_place: Some(Half::new(Collective::AllReduce, 2, 8, 1.0)), ..row() };
        assert_eq!(sweep(&bare, "shm", false).split(',').count(), SWEEP_HEADER.split(',').count());
    }
}
