use super::*;
use collectives::ReduceOp;

const STATE: [u32; 5] = [1, 2, 3, 4, 5];

/// Runs a transfer on rank 0, which wants a tensor of `N` elements. Rank 1 says `text` in place of its declaration, claims that it has
/// `claimed` bytes, and sends `message`. Returns the error of rank 0.
fn error_about<T: Element, const N: usize>(text: &str, claimed: Option<u64>, message: Option<&[u8]>) -> Error {
    let errors = Communicator::run_local(2, |comm| {
        if comm.rank() == 0 {
            let mut got = [T::default(); N];
            let mut transfer = StateTransfer::new(comm)?;
            transfer.want("w", &[N], Piece::Whole, &mut got);
            return Ok(Some(transfer.run().unwrap_err()));
        }
        let comm = comm.duplicate()?;
        everywhere(&comm, TRANSFERRING, Ok(()))?;
        everywhere(&comm, TRANSFERRING, Ok(()))?;
        let mut lengths = [0; 2];
        comm.all_gather_into(&[claimed.unwrap_or(text.len() as u64)], &mut lengths)?;
        if claimed.is_some() {
            return Ok(None);
        }
        let counts = lengths.map(|length| length as usize);
        comm.all_gather_v_into(text.as_bytes(), &mut vec![0; counts.iter().sum()], &counts)?;
        if let Some(message) = message {
            comm.send(message, 0)?;
            // Rank 0 ends the communicator.
            let _ = comm.all_reduce(&mut [0_u64; 5], ReduceOp::Max);
        }
        Ok(None)
    });
    errors.unwrap().swap_remove(0).unwrap()
}

const OFFER: &str = r#"{"offered":[{"name":"w","dtype":"U32","shape":[5],"piece":"whole"}],"wanted":[]}"#;

#[test]
fn declarations_that_no_rank_makes_are_refused() {
    let cases = [
        ("", "EOF while parsing"),
        ("{", "EOF while parsing"),
        (r#"{"offered":[]}"#, "missing field `wanted`"),
        (r#"{"offered":[{"name":"w","dtype":"U32","shape":[5],"piece":{"flat":{"start":3,"end":9}}}],"wanted":[]}"#, "there is no part"),
        (r#"{"offered":[{"name":"w","dtype":"U32","shape":[5],"piece":{"flat":{"start":3,"end":1}}}],"wanted":[]}"#, "there is no part"),
        (
            r#"{"offered":[{"name":"w","dtype":"U32","shape":[5],"piece":{"along":{"dimension":1,"range":{"start":0,"end":1}}}}],"wanted":[]}"#,
            "there is no part",
        ),
        (r#"{"offered":[{"name":"w","dtype":"X9","shape":[5],"piece":"whole"}],"wanted":[]}"#, "offers X9[5], but rank 0 wants U32[5]"),
        (
            r#"{"offered":[],"wanted":[{"name":"v","dtype":"U32","shape":[18446744073709551615,2],"piece":"whole"}]}"#,
            "rank 1 wants it, but no rank offers it",
        ),
        (
            r#"{"offered":[{"name":"v","dtype":"X9","shape":[5],"piece":"whole"}],"wanted":[{"name":"v","dtype":"X9","shape":[5],"piece":"whole"}]}"#,
            "there is no element type \"X9\"",
        ),
        (
            r#"{"offered":[{"name":"v","dtype":"U8","shape":[18446744073709551615,2],"piece":"whole"}],"wanted":[{"name":"v","dtype":"U8","shape":[18446744073709551615,2],"piece":"whole"}]}"#,
            "more elements than fit into the address space",
        ),
    ];
    for (text, words) in cases {
        let error = error_about::<u32, 5>(text, None, None).to_string();
        assert!(error.contains(words), "{text}: {error}");
    }
    for claimed in [u64::MAX, MOST_DESCRIBED, 1 << 40] {
        let error = error_about::<u32, 5>("", Some(claimed), None).to_string();
        assert!(error.contains("the limit is 268435456 B in total"), "{error}");
    }
}

#[test]
fn messages_of_another_length_are_refused() {
    for len in [0, 1, 19] {
        let error = error_about::<u32, 5>(OFFER, None, Some(&[7; 32][..len])).to_string();
        assert!(error.contains(&format!("tensor \"w\": {len} B arrived for 5 elements, which have 20 B in total")), "{error}");
    }
    assert!(error_about::<u32, 5>(OFFER, None, Some(&[7; 21])).is_mismatch());
}

#[test]
fn bytes_that_are_no_truth_values_are_refused() {
    let offer = r#"{"offered":[{"name":"w","dtype":"BOOL","shape":[2],"piece":"whole"}],"wanted":[]}"#;
    let error = error_about::<bool, 2>(offer, None, Some(&[1, 2])).to_string();
    assert!(error.contains("tensor \"w\": 2 B arrived, but some of them are not values of type bool"), "{error}");
}

#[test]
fn elements_that_change_on_the_way_are_found() {
    let mut other = STATE;
    other[3] = 9;
    let plain = |state: [u32; 5]| crate::bytes::bytes_of(&state).to_vec();
    let errors = Communicator::run_local(2, |comm| {
        if comm.rank() == 0 {
            // Not all elements of what is offered, so that sources are compared.
            let (mut first, mut rest) = ([0_u32; 2], [0_u32; 3]);
            let mut transfer = StateTransfer::new(comm)?;
            transfer.want("w", &[5], Piece::Flat(0..2), &mut first).want("w", &[5], Piece::Flat(2..5), &mut rest);
            let error = transfer.run().unwrap_err();
            assert_eq!((&first[..], &rest[..]), (&STATE[..2], &other[2..]));
            return Ok(error);
        }
        let comm = comm.duplicate()?;
        everywhere(&comm, TRANSFERRING, Ok(()))?;
        let mut transfer = StateTransfer {
            comm: comm.clone(),
            declaration: Declaration::default(),
            parts: Parts::default(),
            progress: TransferProgress::default(),
            mistake: None,
        };
        transfer.offer("w", &[5], Piece::Whole, &STATE);
        let plan = Plan::new(&transfer.exchange()?).unwrap();
        comm.send(&plain(other)[..8], 0)?;
        comm.send(&plain(other)[8..], 0)?;
        Ok(compare(&comm, &plan, &transfer.parts).unwrap_err())
    });
    for error in errors.unwrap() {
        assert!(error.is_mismatch() && error.to_string().contains("tensor \"w\" (U32[5])"), "{error}");
    }
}
