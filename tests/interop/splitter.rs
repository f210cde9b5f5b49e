//! A TCP proxy that delivers every byte in its own segment.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};

/// Forwards connections to a port until the test's process ends, and returns its own port.
pub(crate) fn splitter(target: u16, whole: usize) -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for near in listener.incoming().map_while(Result::ok) {
            let Ok(far) = TcpStream::connect((Ipv4Addr::LOCALHOST, target)) else { return };
            let (back_from, back_to) = (far.try_clone().unwrap(), near.try_clone().unwrap());
            std::thread::spawn(move || pass(near, far, whole));
            std::thread::spawn(move || pass(back_from, back_to, 0));
        }
    });
    port
}

/// Copies bytes: the first `whole` as they arrive, then one at a time.
fn pass(mut from: TcpStream, mut to: TcpStream, mut whole: usize) {
    to.set_nodelay(true).unwrap();
    let mut scratch = [0; 1024];
    while let Ok(count @ 1..) = from.read(&mut scratch) {
        let (first, rest) = scratch[..count].split_at(whole.min(count));
        whole -= first.len();
        if to.write_all(first).and_then(|()| rest.iter().try_for_each(|byte| to.write_all(&[*byte]))).is_err() {
            return;
        }
    }
    drop(to.shutdown(std::net::Shutdown::Write));
}
