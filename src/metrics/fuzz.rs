//! Properties that must hold for any request to the port of the metrics.

use super::request::{LONGEST, answer, status};

/// Reads a request that arrives byte by byte. Checks that later bytes do not change its status, and that the status is
/// known at the latest when the request is too long.
pub fn metrics_requests(data: &[u8]) {
    let whole = status(data);
    assert!(whole.is_some() || data.len() < LONGEST, "{} B without a status", data.len());
    let first = (0..data.len()).step_by(1 + data.len() / 32).find_map(|length| status(&data[..length]));
    assert!(first.is_none() || first == whole, "{first:?}, then {whole:?}");
    let Some(status) = whole else { return };
    let text = answer(status, || "metrics".to_owned());
    assert_eq!(text.ends_with("\r\n\r\nmetrics"), data.starts_with(b"GET /") && status.starts_with("200 "), "{text}");
}

/// Returns initial inputs.
pub(crate) fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let prometheus = "GET /metrics HTTP/1.1\r\nHost: 10.0.0.1:9400\r\nUser-Agent: Prometheus/3.5.0\r\n\
                      Accept: application/openmetrics-text;version=1.0.0;q=0.6,*/*;q=0.1\r\nAccept-Encoding: gzip\r\n\r\n";
    let requests = [prometheus, "GET / HTTP/1.0\r\n\r\n", "POST /metrics HTTP/1.1\r\n\r\n", "GET /other?a=b HTTP/1.1\n\n"];
    requests.map(|request| ("metrics_requests", request.as_bytes().to_vec())).to_vec()
}
