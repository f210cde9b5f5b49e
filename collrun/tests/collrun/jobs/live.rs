//! The output of ranks appears as soon as they print it.

use super::*;

/// Reads until these bytes have arrived, or until the end. Returns what was read.
fn read_until(stream: &mut impl Read, expected: &str) -> String {
    let (mut read, mut byte) = (Vec::new(), [0]);
    while !read.ends_with(expected.as_bytes()) && stream.read(&mut byte).unwrap() > 0 {
        read.push(byte[0]);
    }
    String::from_utf8(read).unwrap()
}

/// Runs a job whose rank prints each piece on a stream only after the previous one has been seen.
fn seen_piece_by_piece(flags: &str, stream: u8, pieces: &[(&str, &str)]) {
    let folder = folder();
    let printed: String = pieces
        .iter()
        .enumerate()
        .map(|(place, (piece, _))| {
            format!("while [ ! -e {}/{place} ]; do sleep 0.01; done; printf '{piece}' >&{stream}; ", folder.path().display())
        })
        .collect();
    let mut child = collrun(flags, &printed).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let _limit = Limit::on(&child);
    let mut shown: Box<dyn Read> =
        if stream == 1 { Box::new(child.stdout.take().unwrap()) } else { Box::new(child.stderr.take().unwrap()) };
    for (place, (_, expected)) in pieces.iter().enumerate() {
        std::fs::write(folder.path().join(place.to_string()), "").unwrap();
        assert_eq!(read_until(&mut shown, expected), *expected, "piece {place}");
    }
    let mut rest = String::new();
    shown.read_to_string(&mut rest).unwrap();
    assert_eq!((rest.as_str(), child.wait().unwrap().code()), ("\n", Some(0)));
}

#[test]
fn a_progress_bar_is_live_behind_its_rank() {
    for stream in [1, 2] {
        seen_piece_by_piece("", stream, &[("\\r 10%%", "\r[0]  10%"), ("\\r 20%%", "\r[0]  20%"), ("\\r100%%", "\r[0] 100%")]);
    }
}

#[test]
fn a_question_without_an_end_of_line_is_seen() {
    seen_piece_by_piece("", 1, &[("loading ", "[0] loading "), ("shard 1, ", "shard 1, "), ("shard 2", "shard 2")]);
}

#[test]
fn ranks_that_print_pieces_of_lines_do_not_mix_them() {
    // Rank 0 begins a line, and continues it after rank 1 has printed a whole one.
    let folder = folder();
    let script = format!(
        "if [ $RANK = 0 ]; then printf load; while [ ! -e {0}/1 ]; do sleep 0.01; done; printf 'ing\\n'; exit; fi
         while [ ! -e {0}/0 ]; do sleep 0.01; done; echo whole >&2",
        folder.path().display()
    );
    // One pipe for both streams, as with 2>&1.
    let (read, write) = std::io::pipe().unwrap();
    let mut child = collrun("--nproc-per-node 2", &script).stdout(write.try_clone().unwrap()).stderr(write).spawn().unwrap();
    let _limit = Limit::on(&child);
    let mut shown = BufReader::new(read);
    for (name, expected) in [("0", "[0] load"), ("1", "\n[1] whole\n"), ("", "[0] ing\n")] {
        assert_eq!(read_until(&mut shown, expected), expected);
        std::fs::write(folder.path().join(name), "").unwrap_or_default();
    }
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn log_files_have_the_bytes_as_they_were_printed() {
    let logs = folder();
    let run = output(&format!("--log-dir {} --tee 1", logs.path().display()), "printf '\\r 10%%\\r 20%%\\nend'");
    assert_eq!(run.stdout, b"\r[0]  10%\r[0]  20%\n[0] end\n");
    assert_eq!(files(logs.path()), [("attempt_0/0/stdout.log".to_owned(), "\r 10%\r 20%\nend".to_owned())]);
}
