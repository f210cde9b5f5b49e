//! The requests and answers of HTTP that a collector of metrics needs. Pure.

/// The longest head of a request, in bytes. Prometheus sends less than 1 KiB.
pub(super) const LONGEST: usize = 8 << 10;

const OK: &str = "200 OK";
const MALFORMED: &str = "400 Bad Request";
const ABSENT: &str = "404 Not Found";
const NOT_A_GET: &str = "405 Method Not Allowed";
const TOO_LONG: &str = "431 Request Header Fields Too Large";

/// Returns the status of the answer to a request that begins with these bytes; `None` if its head is not complete. Bytes
/// after the head do not change the status.
pub(super) fn status(received: &[u8]) -> Option<&'static str> {
    let begin = &received[..received.len().min(LONGEST)];
    let is_complete = begin.windows(2).any(|end| end == b"\n\n") || begin.windows(3).any(|end| end == b"\n\r\n");
    if !is_complete {
        return (received.len() >= LONGEST).then_some(TOO_LONG);
    }
    let line = begin.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    let words: Vec<&[u8]> = line.splitn(4, |byte| *byte == b' ').collect();
    Some(match words[..] {
        [method, target, version] if version.starts_with(b"HTTP/1.") && !method.is_empty() => of_target(method, target),
        _ => MALFORMED,
    })
}

fn of_target(method: &[u8], target: &[u8]) -> &'static str {
    let path = target.split(|byte| *byte == b'?').next().unwrap_or_default();
    match (method, path) {
        (b"GET", b"/" | b"/metrics") => OK,
        (b"GET", _) => ABSENT,
        _ => NOT_A_GET,
    }
}

/// Returns the answer with this status. It has the text of the metrics only if the status is that of a good request.
pub(super) fn answer(status: &str, metrics: impl FnOnce() -> String) -> String {
    let (kind, body) = if status == OK {
        ("application/openmetrics-text; version=1.0.0; charset=utf-8", metrics())
    } else {
        ("text/plain; charset=utf-8", format!("{status}: send GET /metrics\n"))
    };
    let allow = if status == NOT_A_GET { "Allow: GET\r\n" } else { "" };
    let length = body.len();
    format!("HTTP/1.0 {status}\r\n{allow}Content-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_has_its_status_as_soon_as_its_head_is_complete() {
        let long = format!("GET /metrics HTTP/1.1\r\nA: {}", "b".repeat(LONGEST));
        for (request, expected) in [
            ("GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n", OK),
            ("GET / HTTP/1.0\n\n", OK),
            ("GET /metrics?name[]=a HTTP/1.1\r\n\r\nrest", OK),
            ("GET /metric HTTP/1.1\r\n\r\n", ABSENT),
            ("HEAD /metrics HTTP/1.1\r\n\r\n", NOT_A_GET),
            ("get /metrics HTTP/1.1\r\n\r\n", NOT_A_GET),
            ("GET /metrics\r\n\r\n", MALFORMED),
            ("GET  /metrics HTTP/1.1\r\n\r\n", MALFORMED),
            ("GET /metrics HTTP/2\r\n\r\n", MALFORMED),
            ("\n\n", MALFORMED),
            (&long, TOO_LONG),
        ] {
            assert_eq!(status(request.as_bytes()), Some(expected), "{request:?}");
        }
        let whole = b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n";
        for length in 0..whole.len() {
            assert_eq!(status(&whole[..length]), None, "{length} B");
        }
    }

    #[test]
    fn only_a_good_request_gets_the_metrics() {
        let good = answer(OK, || "metrics\n".to_owned());
        assert!(good.starts_with("HTTP/1.0 200 OK\r\nContent-Type: application/openmetrics-text;"), "{good}");
        assert!(good.contains("Content-Length: 8\r\n") && good.ends_with("\r\n\r\nmetrics\n"), "{good}");
        let bad = answer(NOT_A_GET, || unreachable!());
        assert!(bad.contains("\r\nAllow: GET\r\n") && bad.ends_with("405 Method Not Allowed: send GET /metrics\n"), "{bad}");
    }
}
