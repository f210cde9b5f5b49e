//! Admissions: requests that hold up no other, and thousands of admissions in a simulated world.

mod simulated;
mod world;

use std::net::TcpListener;
use std::time::Duration;

use super::attempt::candidates;
use super::protocol::Members;
use super::requests::{Request, Requests};
use crate::base::deadline::Deadline;
use crate::communicator::Communicator;

#[test]
fn a_newcomer_that_confirms_and_never_connects_leaves_the_members_as_they_were() {
    let builder = Communicator::builder().configure(|config| config.timeout = Duration::from_secs(4));
    let comm = builder.local(1).unwrap().remove(0);
    // It lives: its listener accepts connections.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (requests, settings) = (Requests::new(comm.own_store().unwrap()), comm.settings());
    let request = Request { settings, listener: listener.local_addr().ok(), from: "a test".to_owned() };
    let number = requests.add(&request).unwrap();
    // The confirmation may come first.
    requests.confirm(number, 1).unwrap();
    let membership = comm.admit().unwrap();
    assert!(membership.newcomers.is_empty());
    membership.communicator.barrier().unwrap();
    assert_eq!(requests.open().unwrap(), [(number, 1, request)]);
    assert!(!requests.decision(number, 1, &Deadline::after(Duration::ZERO)).unwrap());
}

/// Lets one newcomer in. Then all ranks take the numbers that they wish. The newcomer wishes for 0.
#[test]
fn a_newcomer_takes_a_former_number_with_a_split() {
    let members = Communicator::local(2).unwrap();
    let address = members[0].join_address().unwrap();
    let renumbered = |comm: &Communicator, wish: i64| comm.split(Some(0), wish).unwrap().unwrap();
    let later = std::thread::scope(|scope| {
        let newcomer = scope.spawn(|| renumbered(&Communicator::join(address).unwrap().communicator, 0));
        let admit = |comm: Communicator| {
            let mut membership = comm.admit().unwrap();
            while membership.newcomers.is_empty() {
                membership = comm.admit().unwrap();
            }
            // Ranks 0 and 1 of before continue as 1 and 2.
            renumbered(&membership.communicator, comm.rank() as i64 + 1)
        };
        let members: Vec<_> = members.into_iter().map(|comm| scope.spawn(move || admit(comm))).collect();
        let members = members.into_iter().map(|member| member.join().unwrap());
        std::iter::once(newcomer.join().unwrap()).chain(members).collect::<Vec<_>>()
    });
    assert_eq!(later.iter().map(Communicator::rank).collect::<Vec<_>>(), [0, 1, 2]);
    // The renumbered communicator admits too, and keeps its numbers.
    std::thread::scope(|scope| {
        for comm in &later {
            scope.spawn(|| assert_eq!(comm.admit().unwrap().communicator.rank(), comm.rank()));
        }
    });
}

#[test]
fn a_huge_request_holds_up_no_other() {
    let comm = Communicator::local(1).unwrap().remove(0);
    let (requests, settings) = (Requests::new(comm.own_store().unwrap()), comm.settings());
    let huge = Request { settings: "x".repeat(1 << 20), listener: None, from: String::new() };
    let number = requests.add(&huge).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let second = requests.add(&Request { settings, listener: listener.local_addr().ok(), from: "a test".to_owned() }).unwrap();
    let candidates = candidates(&comm).unwrap();
    assert_eq!(candidates.iter().map(|candidate| candidate.number).collect::<Vec<_>>(), [second]);
    assert!(requests.answer(number, 1, &Deadline::after(Duration::ZERO)).unwrap().is_some());
}
