//! How a link begins, and which connections are refused.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;

use super::{LOCALHOST, hello, is_closed, membership, read_exactly, soon, terms, wait_for_descriptor, write_all};
use crate::authentication::{self, AuthenticationError, Secret};
use crate::host::net::connector::{ConnectError, Connector};
use crate::host::net::hello::{Answer, CONFIRM, Hello, Reason};
use crate::host::net::listener::Acceptor;
use crate::host::net::{Channel, Link};

/// Returns the result of a connection attempt while `acceptor` is served.
fn attempt(acceptor: &mut Acceptor, hello: Hello) -> std::result::Result<Link, ConnectError> {
    let mut connector = Connector::new(acceptor.address().unwrap(), hello, terms(None), true, None);
    let deadline = soon();
    loop {
        if let Some(link) = connector.advance()? {
            return Ok(link);
        }
        assert!(!deadline.has_passed(), "{}", connector.progress());
        acceptor.poll();
    }
}

#[test]
fn a_refused_hello_tells_why() {
    let mut acceptor = Acceptor::bind(LOCALHOST, membership(1), terms(None)).unwrap();
    let mut refused = |change: &dyn Fn(&mut Hello)| {
        let mut hello = hello(0, 1);
        change(&mut hello);
        match attempt(&mut acceptor, hello) {
            Err(ConnectError::Refused { refusal, .. }) => refusal,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(refused(&|hello| hello.sender.job_nonce[0] ^= 1).reason, Reason::Job);
    assert_eq!(refused(&|hello| hello.sender.world_size = 4).reason, Reason::WorldSize);
    assert_eq!(refused(&|hello| hello.sender.rank = 3).reason, Reason::Rank);
    let wrong = refused(&|hello| hello.receiver = 2);
    assert_eq!((wrong.reason, wrong.text.as_str()), (Reason::Rank, "the hello is for rank 2, but this is rank 1"));
    let wrong = refused(&|hello| hello.sender.communicator = 78);
    assert_eq!((wrong.reason, wrong.text.as_str()), (Reason::Communicator, "the hello names communicator 0x4e, but this is 0x4d"));
}

/// Waits until the acceptor has something to do, and serves it.
fn serve_once(acceptor: &mut Acceptor) {
    wait_for_descriptor(acceptor.readiness().as_fd(), PollFlags::IN);
    acceptor.poll();
}

#[test]
fn a_link_that_waits_is_not_replaced_by_another() {
    let mut acceptor = Acceptor::bind(LOCALHOST, membership(1), terms(None)).unwrap();
    let mut first = attempt(&mut acceptor, hello(0, 1)).unwrap();
    serve_once(&mut acceptor);
    match attempt(&mut acceptor, hello(0, 1)) {
        Err(ConnectError::Refused { refusal, .. }) => assert_eq!(refusal.reason, Reason::Duplicate),
        other => panic!("{other:?}"),
    }
    write_all(&mut first, b"first");
    assert!(acceptor.take(Channel::Collective, 0, 0).is_none() && acceptor.take(Channel::PointToPoint, 0, 2).is_none());
    assert_eq!(read_exactly(&mut acceptor.take(Channel::PointToPoint, 0, 0).unwrap(), 5), b"first");
    assert!(attempt(&mut acceptor, hello(0, 1)).is_ok());
}

/// Returns a connection that sent a hello as rank 0, was welcomed, and has not confirmed.
fn welcomed(acceptor: &mut Acceptor) -> TcpStream {
    let mut peer = TcpStream::connect(acceptor.address().unwrap()).unwrap();
    peer.write_all(&hello(0, 1).to_bytes()).unwrap();
    peer.set_nonblocking(true).unwrap();
    let mut answer = [0; 64];
    loop {
        acceptor.poll();
        match peer.read(&mut answer) {
            Ok(read) => {
                assert_eq!(answer[..read], Answer::Welcome.to_bytes());
                return peer;
            }
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
    }
}

#[test]
fn an_attempt_that_was_given_up_leaves_no_link() {
    let mut acceptor = Acceptor::bind(LOCALHOST, membership(1), terms(None)).unwrap();
    let abandoned = welcomed(&mut acceptor);
    assert!(acceptor.take(Channel::PointToPoint, 0, 0).is_none(), "not confirmed");
    drop(abandoned);
    serve_once(&mut acceptor);
    assert!(acceptor.take_all(Channel::PointToPoint).is_empty());

    let mut link = attempt(&mut acceptor, hello(0, 1)).unwrap();
    let mut taken = loop {
        acceptor.poll();
        if let Some((rank, link)) = acceptor.take_all(Channel::PointToPoint).pop() {
            assert_eq!(rank, 0);
            break link;
        }
    };
    write_all(&mut link, b"the second one");
    assert_eq!(read_exactly(&mut taken, 14), b"the second one");
}

#[test]
fn silent_unproven_connections_are_few_and_do_not_stay() {
    let mut acceptor = Acceptor::bind(LOCALHOST, membership(1), terms(None)).unwrap();
    let address = acceptor.address().unwrap();
    let begun = Instant::now();
    let mut pending: Vec<TcpStream> = (0..300).map(|_| TcpStream::connect(address).unwrap()).collect();
    while acceptor.pending() < 256 {
        acceptor.poll_at(begun);
    }
    acceptor.poll_at(begun);
    assert_eq!(acceptor.pending(), 256, "no more come in");
    assert!(!pending.iter_mut().any(is_closed), "each is left in peace for a moment");
    while !is_closed(&mut pending[63]) {
        acceptor.poll_at(begun + Duration::from_millis(200));
    }
    let closed: Vec<bool> = pending.iter_mut().map(is_closed).collect();
    assert!(closed[..64].iter().all(|&closed| closed), "the oldest make room: {closed:?}");
    assert!(!closed[64..].iter().any(|&closed| closed), "the others may stay: {closed:?}");

    // Even among them, a valid peer is accepted.
    drop(attempt(&mut acceptor, hello(2, 1)).unwrap());
    acceptor.poll_at(begun + Duration::from_secs(9));
    assert!(!is_closed(&mut pending[255]));
    acceptor.poll_at(begun + Duration::from_secs(21));
    assert!(pending.iter_mut().all(is_closed));
}

#[test]
fn a_welcomed_peer_may_take_its_time() {
    let mut acceptor = Acceptor::bind(LOCALHOST, membership(1), terms(None)).unwrap();
    let mut peer = welcomed(&mut acceptor);
    acceptor.poll_at(Instant::now() + Duration::from_secs(3600));
    peer.write_all(&[CONFIRM]).unwrap();
    serve_once(&mut acceptor);
    assert!(acceptor.take(Channel::PointToPoint, 0, 0).is_some());
}

#[test]
fn junk_for_an_answer_is_quoted() {
    let listener = TcpListener::bind((LOCALHOST, 0)).unwrap();
    let mut connector = Connector::new(listener.local_addr().unwrap(), hello(0, 1), terms(None), true, None);
    let talker = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"220 mail.example ESMTP\r\n").unwrap();
        stream
    });
    let error = loop {
        match connector.advance() {
            Ok(None) => {}
            Ok(Some(link)) => panic!("{link:?}"),
            Err(error) => break error,
        }
    };
    assert!(error.to_string().contains("\"220 mail.example"), "{error}");
    drop(talker.join());
}

#[test]
fn a_connection_that_is_dropped_without_an_answer_is_tried_again() {
    let mut acceptor = Acceptor::bind(LOCALHOST, membership(1), terms(None)).unwrap();
    let address = acceptor.address().unwrap();
    let mut connector = Connector::new(address, hello(0, 1), terms(None), true, None);
    while !connector.progress().contains("not answered") {
        assert!(connector.advance().unwrap().is_none());
    }
    // The peer has no room left before it reads the hello: its acceptor drops the connection unread.
    while acceptor.accept_raw().is_err() {}
    let deadline = soon();
    let link = loop {
        acceptor.poll();
        if let Some(link) = connector.advance().unwrap() {
            break link;
        }
        assert!(!deadline.has_passed());
    };
    assert!(connector.progress().contains("before that"), "{}", connector.progress());
    drop(link);
}

#[test]
fn a_black_hole_does_not_hold_the_connector() {
    // A test cannot have a host that drops everything, but a full queue of connections also drops new ones.
    let listener = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    listener.bind(&SocketAddr::new(LOCALHOST, 0).into()).unwrap();
    listener.listen(0).unwrap();
    let address = listener.local_addr().unwrap().as_socket().unwrap();
    let began = Instant::now();
    let mut connectors: Vec<_> = (0..4).map(|_| Connector::new(address, hello(0, 1), terms(None), true, None)).collect();
    for _ in 0..50 {
        for connector in &mut connectors {
            assert!(connector.advance().unwrap().is_none());
        }
    }
    assert!(began.elapsed() < Duration::from_secs(2));
    assert!(connectors.iter().any(|connector| connector.progress().contains("still connecting")));
}

/// Returns the result of a connection attempt if the two ends have these secrets.
fn proving(mine: Option<u8>, theirs: Option<u8>, hello: Hello) -> std::result::Result<(), ConnectError> {
    let secret = |seed: Option<u8>| seed.map(|seed| Secret::new(vec![seed; 32]).unwrap());
    proving_with(secret(mine), secret(theirs), hello)
}

fn proving_with(mine: Option<Secret>, theirs: Option<Secret>, hello: Hello) -> std::result::Result<(), ConnectError> {
    let mut acceptor = Acceptor::bind(LOCALHOST, membership(1), terms(theirs)).unwrap();
    let mut connector = Connector::new(acceptor.address().unwrap(), hello, terms(mine), true, None);
    let deadline = soon();
    while connector.advance()?.is_none() {
        assert!(!deadline.has_passed(), "{}", connector.progress());
        acceptor.poll();
    }
    while acceptor.take(Channel::PointToPoint, 0, 0).is_none() {
        serve_once(&mut acceptor);
    }
    Ok(())
}

#[test]
fn a_link_wants_a_proof_where_there_is_a_secret() {
    proving(Some(1), Some(1), hello(0, 1)).unwrap();
    match proving(Some(2), Some(1), hello(0, 1)) {
        Err(ConnectError::Unauthenticated { why: AuthenticationError::Refused(authentication::Reason::Wrong), .. }) => {}
        other => panic!("{other:?}"),
    }
    match proving(Some(2), None, hello(0, 1)) {
        Err(ConnectError::Unauthenticated { why: AuthenticationError::Refused(authentication::Reason::NoSecret), .. }) => {}
        other => panic!("{other:?}"),
    }
    match proving(None, Some(1), hello(0, 1)) {
        Err(ConnectError::Refused { refusal, .. }) => {
            assert_eq!(refusal.reason, Reason::Unauthenticated);
            assert!(refusal.text.contains("COLLECTIVES_SECRET"), "{refusal}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_proven_hello_is_checked_like_any_other() {
    let wrong = Hello { receiver: 2, ..hello(0, 1) };
    match proving(Some(1), Some(1), wrong) {
        Err(ConnectError::Refused { refusal, .. }) => assert_eq!(refusal.reason, Reason::Rank),
        other => panic!("{other:?}"),
    }
}

#[cfg(feature = "encryption")]
#[test]
fn an_encrypted_link_wants_the_same_secret_and_encryption_at_both_ends() {
    let encrypting = |seed: u8| Some(Secret::new(vec![seed; 32]).unwrap().encrypting().unwrap());
    let plain = || Some(Secret::new(vec![1; 32]).unwrap());
    proving_with(encrypting(1), encrypting(1), hello(0, 1)).unwrap();
    for (mine, theirs, reason, words) in [
        (encrypting(2), encrypting(1), authentication::Reason::Wrong, "a different secret"),
        (encrypting(1), None, authentication::Reason::NoSecret, "it has no secret"),
        (
            encrypting(1),
            plain(),
            authentication::Reason::Encrypted,
            "it does not encrypt its connections, and this process does; set COLLECTIVES_ENCRYPT",
        ),
        (
            plain(),
            encrypting(1),
            authentication::Reason::Plain,
            "it encrypts its connections, and this process does not; set COLLECTIVES_ENCRYPT",
        ),
    ] {
        let error = proving_with(mine, theirs, hello(0, 1)).unwrap_err();
        assert!(error.to_string().contains("rank 1") && error.to_string().contains(words), "{error}");
        assert!(
            matches!(error, ConnectError::Unauthenticated { why: AuthenticationError::Refused(told), .. } if told == reason),
            "{error}"
        );
    }
    match proving_with(None, encrypting(1), hello(0, 1)) {
        Err(ConnectError::Refused { refusal, .. }) => assert_eq!(refusal.reason, Reason::Unauthenticated),
        other => panic!("{other:?}"),
    }
    // After the proof, a refusal uses the encryption that was agreed on.
    match proving_with(encrypting(1), encrypting(1), Hello { receiver: 2, ..hello(0, 1) }) {
        Err(ConnectError::Refused { refusal, .. }) => {
            assert_eq!((refusal.reason, refusal.text.as_str()), (Reason::Rank, "the hello is for rank 2, but this is rank 1"));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_proof_cannot_be_sent_back_to_the_rank_that_made_it() {
    // A third party poses as rank 1 and relays everything between rank 0's connector and rank 0's own listener.
    let secret = Secret::new(vec![1; 32]).unwrap();
    let mut acceptor = Acceptor::bind(LOCALHOST, membership(0), terms(Some(secret.clone()))).unwrap();
    let between = TcpListener::bind((LOCALHOST, 0)).unwrap();
    let mut connector = Connector::new(between.local_addr().unwrap(), hello(0, 1), terms(Some(secret)), true, None);
    assert!(connector.advance().unwrap().is_none());
    let (left, _) = between.accept().unwrap();
    let right = TcpStream::connect(acceptor.address().unwrap()).unwrap();
    left.set_nonblocking(true).unwrap();
    right.set_nonblocking(true).unwrap();
    let deadline = soon();
    let refused = loop {
        assert!(!deadline.has_passed(), "{}", connector.progress());
        match connector.advance() {
            Ok(link) => assert!(link.is_none(), "rank 0 has linked to itself"),
            Err(error) => break error,
        }
        acceptor.poll();
        for (mut from, mut to) in [(&left, &right), (&right, &left)] {
            let mut bytes = [0; 512];
            if let Ok(read) = from.read(&mut bytes) {
                to.write_all(&bytes[..read]).unwrap();
            }
        }
    };
    assert!(matches!(&refused, ConnectError::Refused { refusal, .. } if refusal.reason == Reason::Rank), "{refused}");
}
