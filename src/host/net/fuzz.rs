//! Properties that must hold for any bytes sent to a listener.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::time::{Duration, Instant};

use super::hello::{Answer, CONFIRM, Channel, Hello, Membership, Reason, Refusal};
use super::link::Terms;
use super::listener::Acceptor;
use super::mesh::Address;

/// How long a connection over the loopback interface may take.
const LIMIT: Duration = Duration::from_secs(10);

/// Rank 4 of 9.
const ME: Membership = Membership { job_nonce: *b"0123456789abcdef", communicator: 3, rank: 4, world_size: 9 };

/// Decodes any bytes as a hello, as an answer and as an address, and checks each value that the decoders return.
/// Further bytes must not change the value. If the value is encoded and decoded again, it must stay the same.
pub fn greetings(data: &[u8]) {
    let hello = settled(data, |bytes| Hello::decode(bytes).map_err(|no_hello| format!("{no_hello:?}").len()));
    if let Ok(Some(hello)) = hello {
        assert_eq!(Hello::decode(&hello.to_bytes()), Ok(Some(hello)));
        let is_welcome = hello.check(&ME).is_ok();
        let is_right = hello.sender == Membership { rank: hello.sender.rank, ..ME } && hello.receiver == ME.rank;
        assert!(!is_welcome || (is_right && hello.sender.rank < ME.world_size && hello.sender.rank != ME.rank));
    }
    let answer = settled(data, |bytes| Answer::decode(bytes).map_err(|what| what.len()));
    if let Ok(Some(answer)) = answer {
        let bytes = answer.to_bytes();
        assert!(bytes.len() <= Answer::MAX_BYTES);
        assert_eq!(Answer::decode(&bytes), Ok(Some(answer)));
    }
    if let Ok(address) = Address::from_bytes(data) {
        assert!(Address::from_bytes(&address.to_bytes()).is_ok(), "{address:?}");
        assert!(!matches!(address, Address::At(_)) || address.to_bytes() == data);
    }
}

/// Returns the result of decoding all the bytes. Also decodes the first bytes alone, from none to all of them, and
/// checks that the first result other than `None` is the result for all bytes.
fn settled<T: PartialEq + std::fmt::Debug>(data: &[u8], decode: impl Fn(&[u8]) -> Result<Option<T>, usize>) -> Result<Option<T>, usize> {
    let whole = decode(data);
    let first = (0..=data.len()).map(|length| decode(&data[..length])).find(|decoded| *decoded != Ok(None));
    match first {
        None => assert_eq!(whole, Ok(None)),
        Some(Ok(decoded)) => assert_eq!(whole, Ok(decoded)),
        // The quoted text grows with the bytes.
        Some(Err(_)) => assert!(whole.is_err()),
    }
    whole
}

/// Sends any bytes to a listening rank, and checks that a correct peer that connects later still gets its link.
pub fn acceptor(data: &[u8]) {
    let mut acceptor =
        Acceptor::bind(Ipv4Addr::LOCALHOST.into(), ME, Terms { secret: None, silence_timeout: LIMIT, connections: 1, ports: None })
            .expect("a port of this host");
    let address = acceptor.address().expect("bound");
    let mut pending = TcpStream::connect(address).expect("connected");
    // Lingering connections would exhaust the ports in a long run.
    socket2::SockRef::from(&pending).set_linger(Some(Duration::ZERO)).expect("a socket's own option");
    pending.write_all(&data[..data.len().min(4096)]).expect("a new socket has room for these bytes");
    acceptor.poll();
    let hello = Hello { channel: Channel::PointToPoint, connection: 0, sender: Membership { rank: 5, ..ME }, receiver: ME.rank };
    let mut peer = TcpStream::connect(address).expect("connected");
    socket2::SockRef::from(&peer).set_linger(Some(Duration::ZERO)).expect("a socket's own option");
    peer.set_read_timeout(Some(LIMIT)).expect("a socket's own option");
    peer.write_all(&hello.to_bytes()).expect("a new socket has room for these bytes");
    acceptor.poll();
    let is_theirs = Hello::decode(data) == Ok(Some(hello)) && data.get(Hello::BYTES) == Some(&CONFIRM);
    let expected = if is_theirs { None } else { Some(Answer::Welcome) };
    let mut answer = vec![0; Answer::Welcome.to_bytes().len()];
    peer.read_exact(&mut answer).expect("an answer");
    assert!(expected.is_none_or(|expected| answer == expected.to_bytes()));
    peer.write_all(&[CONFIRM]).expect("a new socket has room for these bytes");
    let began = Instant::now();
    while acceptor.take(Channel::PointToPoint, 0, 5).is_none() {
        assert!(began.elapsed() < LIMIT, "a peer was not let in");
        acceptor.poll();
    }
}

/// Returns the initial inputs.
pub(in crate::host) fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let hello = |channel, rank| Hello { channel, connection: 0, sender: Membership { rank, ..ME }, receiver: ME.rank }.to_bytes().to_vec();
    let refused = Answer::Refused(Refusal::new(Reason::Job, "this process belongs to another job".to_owned()));
    let hellos = [hello(Channel::Collective, 3), hello(Channel::PointToPoint, 5), hello(Channel::PointToPoint, 6)];
    let mut seeds = vec![
        ("greetings", Answer::Welcome.to_bytes()),
        ("greetings", refused.to_bytes()),
        ("greetings", Address::At(([10, 1, 2, 3], 4567).into()).to_bytes()),
        ("greetings", Address::At(([0xfd00, 0, 0, 0, 0, 0, 1, 2], 258).into()).to_bytes()),
        ("greetings", Address::Failed("no such address".to_owned()).to_bytes()),
    ];
    for hello in hellos {
        seeds.push(("acceptor", [hello.clone(), vec![CONFIRM]].concat()));
        seeds.push(("greetings", hello));
    }
    seeds
}
