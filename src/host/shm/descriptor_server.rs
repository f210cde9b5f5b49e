//! Passes the region's descriptor from the leader to the other ranks of the host, over an abstract Unix socket, whose
//! name is in no file system. Only processes that prove that they know a key receive it. The key is the job's secret,
//! or, if there is none, a random one that the leader sends to the ranks through the exchange. The user ID at the other
//! end is checked first. This check proves nothing: all users that a namespace does not know have the same ID there.
//! Process IDs are not checked: a process of another namespace has none.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    Shutdown, SocketAddrUnix, SocketFlags, SocketType,
};

use crate::authentication::{self, Admission, AuthenticationError, Initiator, Purpose, Reason, Responder, Secret, Spare, Step};
use crate::base::deadline::Deadline;
use crate::base::socket_user::peer_user;
use crate::base::tuning::{admission, net::BACKLOG};

/// The leader's listening socket.
pub(super) struct DescriptorServer {
    listener: OwnedFd,
    name: String,
    /// The key that clients have to know.
    key: Secret,
    /// A reserved descriptor, used to notify clients when no other is left.
    spare: Mutex<Spare>,
}

/// A process that has connected and has not received the file yet.
struct Client {
    connection: OwnedFd,
    responder: Responder,
}

impl DescriptorServer {
    /// Listens under a random name.
    pub(super) fn open(key: &Secret) -> io::Result<Self> {
        let random: String = authentication::random()?[..16].iter().map(|byte| format!("{byte:02x}")).collect();
        let name = format!("collectives-{random}");
        let listener = socket(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?;
        rustix::net::bind(&listener, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
        rustix::net::listen(&listener, BACKLOG)?;
        Ok(Self { listener, name, key: key.clone(), spare: Mutex::new(Spare::new()?) })
    }

    /// Returns the name under which others find it. It is not secret: the system shows it to every process.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Hands `file` to every process of this user that connects and knows the key, until [`DescriptorServer::close`].
    /// No client waits for another. Clients that prove nothing, or hang up, are dropped.
    pub(super) fn serve(&self, file: BorrowedFd<'_>) {
        let mut clients = Admission::new(admission::MEMORY);
        while self.wait(&clients) {
            let now = Instant::now();
            self.admit(&mut clients, now);
            for mut client in clients.take() {
                match client.connection.listen(&self.name, file) {
                    Ok(true) => clients.put_back(client),
                    Ok(false) => {}
                    Err(unproven) => refuse(&mut clients, &unproven.to_string()),
                }
            }
            clients.overdue(now);
        }
    }

    /// Waits until a client connects or sends something. Returns `false` once the server is closed.
    fn wait(&self, clients: &Admission<Client>) -> bool {
        let watch = if clients.is_resting() { PollFlags::empty() } else { PollFlags::IN };
        let mut watched = vec![PollFd::from_borrowed_fd(self.listener.as_fd(), watch)];
        watched.extend(clients.iter().map(|client| PollFd::from_borrowed_fd(client.connection.as_fd(), PollFlags::IN)));
        let limit = clients.patience(Instant::now()).map(timespec);
        // After a signal or a lack of memory, look again as well.
        let _ = poll(&mut watched, limit.as_ref());
        !watched[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
    }

    /// Accepts the clients that have connected, as far as there is room.
    fn admit(&self, clients: &mut Admission<Client>, now: Instant) {
        drop(clients.make_room(now));
        let accept = || match rustix::net::accept_with(&self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            // The listener was closed.
            Err(Errno::INVAL) => Err(io::ErrorKind::WouldBlock.into()),
            accepted => Ok(accepted?),
        };
        let accepted = clients.accept(now, accept);
        for _ in 0..admission::BATCH {
            if !clients.lacks(now) {
                break;
            }
            let Some(connection) = crate::base::event::lock(&self.spare).accept(accept) else { break };
            let _ = send(&connection, &Reason::Starved.to_reply());
            refuse(clients, "this process has no file descriptor left for the connection");
        }
        for connection in accepted {
            match check_user(connection.as_fd()) {
                Ok(()) => {
                    let responder = Responder::new(&self.key, Purpose::Memory, self.name.len());
                    clients.add(Client { connection, responder }, now);
                }
                Err(other) => refuse(clients, &other.to_string()),
            }
        }
    }

    /// Ends [`DescriptorServer::serve`], in whatever thread it runs.
    pub(super) fn close(&self) {
        let _ = rustix::net::shutdown(&self.listener, Shutdown::Both);
    }
}

impl Client {
    /// Continues the proof, and hands the file over after it. Returns whether the client is to be kept.
    fn listen(&mut self, name: &str, file: BorrowedFd<'_>) -> std::result::Result<bool, AuthenticationError> {
        loop {
            let mut bytes = [0; 128];
            let read = match rustix::net::recv(&self.connection, &mut bytes, RecvFlags::empty()) {
                Ok((0, _)) => return Ok(false),
                Ok((read, _)) => read,
                Err(Errno::AGAIN) => return Ok(true),
                Err(Errno::INTR) => continue,
                Err(_) => return Ok(false),
            };
            let reply = self.responder.receive(&bytes[..read]).inspect_err(|error| {
                let _ = send(&self.connection, &error.to_reply());
            })?;
            let proven = self.responder.proven();
            if proven.is_some_and(|context| context != name.as_bytes()) {
                return Err(AuthenticationError::Junk("its proof names another socket".to_owned()));
            }
            if reply.is_some_and(|reply| send(&self.connection, &reply).is_err()) {
                return Ok(false);
            }
            if proven.is_some() {
                hand_over(&self.connection, file);
                return Ok(false);
            }
        }
    }
}

fn socket(flags: SocketFlags) -> io::Result<OwnedFd> {
    Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?)
}

/// Reports that a client was refused.
fn refuse(clients: &mut Admission<Client>, why: &str) {
    if let Some(number) = clients.refuse() {
        crate::base::event::warn!(number, "a process that asked for shared memory was refused: {why}");
    }
}

/// Refuses a process at the other end that runs as another user than this one.
fn check_user(connection: BorrowedFd<'_>) -> io::Result<()> {
    let (theirs, own) = (peer_user(connection)?, rustix::process::geteuid().as_raw());
    if theirs == own {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::Unsupported, format!("the socket belongs to another user ({theirs}; this process runs as {own})")))
}

/// Sends the descriptor with one byte, for which an almost empty socket always has room. If the system refuses that,
/// sends the number of its error instead, in a byte without a descriptor.
fn hand_over(client: &OwnedFd, file: BorrowedFd<'_>) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let files = [file];
    control.push(SendAncillaryMessage::ScmRights(&files));
    if let Err(error) = rustix::net::sendmsg(client, &[IoSlice::new(&[0])], &mut control, SendFlags::NOSIGNAL) {
        crate::base::event::debug!(%error, "a client did not receive the shared memory");
        // A client that has disconnected needs no reason.
        let _ = send(client, &[u8::try_from(error.raw_os_error()).unwrap_or(u8::MAX)]);
    }
}

/// Sends a few bytes, for which an almost empty socket always has room.
fn send(connection: &OwnedFd, words: &[u8]) -> io::Result<()> {
    match rustix::net::send(connection, words, SendFlags::NOSIGNAL)? {
        sent if sent == words.len() => Ok(()),
        sent => Err(io::Error::other(format!("only {sent} of {} bytes could be sent", words.len()))),
    }
}

/// Converts a duration for the kernel: at most a day, so that none is too long.
fn timespec(limit: Duration) -> Timespec {
    let limit = limit.min(Duration::from_secs(86_400));
    Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() }
}

/// Fetches the region's descriptor from the leader that listens under `name` and knows the key.
pub(super) fn fetch(name: &str, key: &Secret, deadline: &Deadline) -> io::Result<OwnedFd> {
    if name.len() > authentication::CONTEXT_BYTES {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the name of the leader's socket is too long"));
    }
    let connection = socket(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?;
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes())?;
    loop {
        match rustix::net::connect(&connection, &address) {
            Ok(()) => break,
            // The leader's queue is full, but it is emptied continuously.
            Err(Errno::AGAIN | Errno::INTR) if !deadline.has_passed() => std::thread::sleep(Duration::from_millis(1)),
            Err(Errno::AGAIN | Errno::INTR) => return Err(late()),
            Err(error) => return Err(error.into()),
        }
    }
    check_user(connection.as_fd())?;
    prove(&connection, name, key, deadline)?;
    patiently(&connection, deadline, || receive(&connection))?.into_file(&connection)
}

/// Proves to the leader that this process knows the key, and checks that the leader knows it too.
fn prove(connection: &OwnedFd, name: &str, key: &Secret, deadline: &Deadline) -> io::Result<()> {
    let refused = |why: AuthenticationError| match why {
        AuthenticationError::Refused(Reason::Starved) => io::Error::new(io::ErrorKind::QuotaExceeded, why.to_string()),
        why => io::Error::new(io::ErrorKind::PermissionDenied, format!("no proof of the job's secret: {why}")),
    };
    let mut initiator = Initiator::new(key, Purpose::Memory, name.as_bytes())?;
    say(connection, &initiator.opening())?;
    loop {
        // Read no more than belongs to the proof: the byte with the descriptor follows it.
        let mut bytes = [0; 64];
        let wanted = initiator.wants().min(bytes.len());
        let read = match patiently(connection, deadline, || rustix::net::recv(connection, &mut bytes[..wanted], RecvFlags::empty())) {
            Ok((read, _)) => read,
            Err(error) if has_hung_up(&error) => 0,
            Err(error) => return Err(error),
        };
        if read == 0 {
            return Err(refused(AuthenticationError::Junk("the leader closed the connection instead of sending a proof".to_owned())));
        }
        match initiator.receive(&bytes[..read]).map_err(refused)? {
            Step::Listen => {}
            Step::Send(tag) => say(connection, &tag)?,
            Step::Done => return Ok(()),
        }
    }
}

/// Sends bytes of a proof. A leader that has hung up is not an error yet: what it sent before can still be read, and
/// gives the reason.
fn say(connection: &OwnedFd, words: &[u8]) -> io::Result<()> {
    send(connection, words).or_else(|error| if has_hung_up(&error) { Ok(()) } else { Err(error) })
}

/// Whether the other end is gone: it closed its socket, with or without unread bytes from this end.
fn has_hung_up(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset)
}

/// Reads as soon as there is something to read, unless the deadline passes first.
fn patiently<T>(connection: &OwnedFd, deadline: &Deadline, mut read: impl FnMut() -> rustix::io::Result<T>) -> io::Result<T> {
    loop {
        match read() {
            Err(Errno::AGAIN | Errno::INTR) if deadline.has_passed() => return Err(late()),
            Err(Errno::AGAIN | Errno::INTR) => {
                let _ = poll(&mut [PollFd::from_borrowed_fd(connection.as_fd(), PollFlags::IN)], Some(&timespec(deadline.remaining())));
            }
            outcome => return Ok(outcome?),
        }
    }
}

fn late() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "the deadline passed")
}

/// The leader's reply to a client that has proven itself.
enum Reply {
    File(OwnedFd),
    /// The leader's system did not send the descriptor, and reported the error of this number.
    NotSent(u8),
    /// The leader sent a descriptor, and this process's system dropped it.
    Dropped,
    /// The leader closed the connection.
    End,
}

impl Reply {
    /// Returns the file, or why there is none. The error is of the kind `Unsupported` if a system does not let
    /// descriptors be passed.
    fn into_file(self, connection: &OwnedFd) -> io::Result<OwnedFd> {
        let (kind, reason) = match self {
            Self::File(file) => return Ok(file),
            Self::NotSent(number) => {
                let error = io::Error::from_raw_os_error(number.into());
                (io::ErrorKind::Unsupported, format!("the leader's system does not let it pass on a file descriptor: {error}"))
            }
            Self::Dropped => {
                // The kernel does the same, without an error, if this process has no number left for a descriptor.
                rustix::io::fcntl_dupfd_cloexec(connection, 0)?;
                (io::ErrorKind::Unsupported, "this process's system does not let it receive the leader's file descriptor".to_owned())
            }
            Self::End => (io::ErrorKind::UnexpectedEof, "the leader closed the connection without sending the shared memory".to_owned()),
        };
        Err(io::Error::new(kind, reason))
    }
}

/// Receives the leader's reply: one byte, and the descriptor that comes with it.
fn receive(connection: &OwnedFd) -> rustix::io::Result<Reply> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let received = rustix::net::recvmsg(connection, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    if received.flags.contains(ReturnFlags::CTRUNC) {
        return Ok(Reply::Dropped);
    }
    let mut files = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(files) => Some(files),
        _ => None,
    });
    Ok(match files.next().and_then(|mut files| files.next()) {
        Some(file) => Reply::File(file),
        None if received.bytes == 0 => Reply::End,
        None => Reply::NotSent(byte[0]),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, memfd_create};

    /// A guard that closes a server, so that the thread that serves ends even if `visit` panics.
    struct Closing<'s>(&'s DescriptorServer);

    impl Drop for Closing<'_> {
        fn drop(&mut self) {
            self.0.close();
        }
    }

    /// Runs `visit` while a server hands out a file.
    fn with_server<T>(key: &Secret, visit: impl FnOnce(&str) -> T) -> T {
        let server = DescriptorServer::open(key).unwrap();
        let file = memfd_create("server-test", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 77).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| server.serve(file.as_fd()));
            let _closing = Closing(&server);
            visit(server.name())
        })
    }

    #[test]
    fn every_client_gets_the_file() {
        let key = secret(1);
        let sizes = with_server(&key, |name| {
            let deadline = Deadline::after(Duration::from_secs(10));
            let size = || rustix::fs::fstat(fetch(name, &key, &deadline).unwrap()).unwrap().st_size;
            std::thread::scope(|scope| {
                let threads: Vec<_> = (0..20).map(|_| scope.spawn(size)).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
            })
        });
        assert_eq!(sizes, [77; 20]);
    }

    fn secret(seed: u8) -> Secret {
        Secret::new(vec![seed; 32]).unwrap()
    }

    #[test]
    fn a_client_without_the_key_gets_nothing() {
        with_server(&secret(1), |name| {
            let deadline = Deadline::after(Duration::from_secs(10));
            // Nor is anything accepted from a leader without the key.
            let error = fetch(name, &secret(2), &deadline).unwrap_err();
            assert!(error.kind() == io::ErrorKind::PermissionDenied && error.to_string().contains("a different secret"), "{error}");
            // A process that has found only the name.
            let silent = socket(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK).unwrap();
            rustix::net::connect(&silent, &SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap()).unwrap();
            assert!(fetch(name, &secret(1), &deadline).is_ok());
            assert_eq!(receive(&silent).err(), Some(Errno::AGAIN), "nothing came");
        });
    }

    #[test]
    fn a_leader_that_hangs_up_instead_of_a_proof_has_given_none() {
        let pair = || rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::NONBLOCK, None).unwrap();
        let patience = Duration::from_secs(10);
        let refusal = move |rank: OwnedFd| prove(&rank, "name", &secret(1), &Deadline::after(patience)).unwrap_err();
        let expect = |error: io::Error, words: &str| {
            assert!(error.kind() == io::ErrorKind::PermissionDenied && error.to_string().contains(words), "{error}");
        };
        let (leader, rank) = pair();
        drop(leader);
        expect(refusal(rank), "closed the connection");
        // Like a leader without a secret, which hands over the file at once.
        let (leader, rank) = pair();
        send(&leader, &[1]).unwrap();
        drop(leader);
        expect(refusal(rank), "it sent");
        // With the opening unread.
        let (leader, rank) = pair();
        let proving = std::thread::spawn(move || refusal(rank));
        poll(&mut [PollFd::from_borrowed_fd(leader.as_fd(), PollFlags::IN)], Some(&timespec(patience))).unwrap();
        drop(leader);
        expect(proving.join().unwrap(), "closed the connection");
    }

    #[test]
    fn a_system_that_passes_no_descriptors_is_named_and_a_lack_of_numbers_is_not_that() {
        let pair = || rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        let refusal = |rank: &OwnedFd| receive(rank).unwrap().into_file(rank).unwrap_err();
        let (leader, rank) = pair();
        send(&leader, &[libc::EPERM as u8]).unwrap();
        let error = refusal(&rank);
        assert!(error.kind() == io::ErrorKind::Unsupported && error.to_string().contains("Operation not permitted"), "{error}");
        // The kernel drops what does not fit, as if a security module did not let this process receive it.
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(9))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let files = [leader.as_fd(); 9];
        assert!(control.push(SendAncillaryMessage::ScmRights(&files)));
        rustix::net::sendmsg(&leader, &[IoSlice::new(&[0])], &mut control, SendFlags::NOSIGNAL).unwrap();
        let error = refusal(&rank);
        assert!(error.kind() == io::ErrorKind::Unsupported && error.to_string().contains("receive"), "{error}");
        drop(leader);
        assert_eq!(refusal(&rank).kind(), io::ErrorKind::UnexpectedEof);
    }

    /// Returns what a process of another user gets when it connects to `name`, and when it opens what this process has
    /// under `path`: an error number for each.
    #[expect(unsafe_code, reason = "what a child does before it becomes another program")]
    fn as_another_user(name: &str, path: &str) -> io::Result<[Option<i32>; 2]> {
        use std::os::unix::process::CommandExt;
        let (address, path) = (SocketAddrUnix::new_abstract_name(name.as_bytes())?, path.to_owned());
        let (mut answers, theirs) = io::pipe()?;
        let mut command = std::process::Command::new("true");
        command.uid(65_534).gid(65_534);
        let visit = move || -> io::Result<()> {
            let client = socket(SocketFlags::CLOEXEC)?;
            rustix::net::connect(&client, &address)?;
            let handed = receive(&client).map(|reply| match reply {
                Reply::File(_) => 0,
                _ => Errno::CONNABORTED.raw_os_error(),
            });
            let opened = std::fs::File::open(&path).map(drop);
            let numbers =
                [handed.unwrap_or_else(Errno::raw_os_error), opened.map_or_else(|error| error.raw_os_error().unwrap_or(-1), |()| 0)];
            numbers.iter().try_for_each(|number| std::io::Write::write_all(&mut &theirs, &number.to_ne_bytes()))
        };
        // SAFETY: the closure makes system calls, and allocates at most as glibc allows after a fork.
        let status = unsafe { command.pre_exec(visit) }.status()?;
        drop(command);
        assert!(status.success(), "{status}");
        let mut bytes = [0; 8];
        io::Read::read_exact(&mut answers, &mut bytes)?;
        let (first, second) = bytes.split_at(4);
        let number = |bytes: &[u8]| Some(i32::from_ne_bytes(bytes.try_into().ok()?)).filter(|number| *number != 0);
        Ok([number(first), number(second)])
    }

    #[test]
    fn a_process_of_another_user_gets_nothing() {
        if !rustix::process::geteuid().is_root() {
            return println!("skipped: only root can become another user");
        }
        let file = memfd_create("region", MemfdFlags::CLOEXEC).unwrap();
        let path = format!("/proc/{}/fd/{}", std::process::id(), std::os::fd::AsRawFd::as_raw_fd(&file));
        assert!(std::fs::File::open(&path).is_ok());
        let key = secret(1);
        with_server(&key, |name| {
            let (handed, opened) = match as_another_user(name, &path) {
                Ok([handed, opened]) => (handed, opened),
                // Root is the only user of its namespace.
                Err(error) if matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::PermissionDenied) => {
                    return println!("skipped: another user cannot be had here: {error}");
                }
                Err(error) => panic!("{error}"),
            };
            let hung_up = [Errno::CONNABORTED, Errno::CONNRESET, Errno::PIPE].map(Errno::raw_os_error);
            assert!(handed.is_some_and(|number| hung_up.contains(&number)), "the server answered {handed:?}");
            assert_eq!(opened, Some(Errno::ACCESS.raw_os_error()), "{path} was opened by another user");
            assert!(fetch(name, &key, &Deadline::after(Duration::from_secs(10))).is_ok());
        });
    }

    /// The variable that marks the process that serves in a namespace of its own.
    const ROLE: &str = "COLLECTIVES_TEST_ROLE";

    /// Serves until standard input ends, after printing its user and the name.
    fn serve_in_a_namespace() {
        let server = DescriptorServer::open(&secret(1)).unwrap();
        let file = memfd_create("server-test", MemfdFlags::CLOEXEC).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| server.serve(file.as_fd()));
            let _closing = Closing(&server);
            println!("\n@{} {}", rustix::process::geteuid().as_raw(), server.name());
            io::stdin().read_line(&mut String::new()).unwrap();
        });
    }

    #[test]
    fn a_user_whom_the_namespace_of_the_leader_does_not_know_gets_nothing_though_it_has_the_same_number_there() {
        use std::io::BufRead;
        use std::process::{Command, Stdio};
        const NAME: &str = "a_user_whom_the_namespace_of_the_leader_does_not_know_gets_nothing_though_it_has_the_same_number_there";
        if std::env::var(ROLE).as_deref() == Ok(NAME) {
            return serve_in_a_namespace();
        }
        if !rustix::process::geteuid().is_root() {
            return println!("skipped: only root can become another user");
        }
        let mut command = Command::new("unshare");
        command.arg("--user").arg(std::env::current_exe().unwrap());
        command.args([&format!("host::shm::descriptor_server::tests::{NAME}"), "--exact", "--nocapture", "--test-threads=1"]);
        command.env(ROLE, NAME).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let Ok(mut leader) = command.spawn() else { return println!("skipped: there is no unshare") };
        let mut lines = io::BufReader::new(leader.stdout.take().unwrap()).lines().map_while(std::result::Result::ok);
        let Some(line) = lines.by_ref().find_map(|line| line.strip_prefix('@').map(str::to_owned)) else {
            leader.wait().unwrap();
            return println!("skipped: user namespaces cannot be made");
        };
        let (user, name) = line.split_once(' ').unwrap();
        assert_eq!(user, "65534", "nobody is known there");
        let connect = || {
            let connection = socket(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK).unwrap();
            rustix::net::connect(&connection, &SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap()).unwrap();
            connection
        };
        let deadline = Deadline::after(Duration::from_secs(10));
        let guess = std::thread::scope(|scope| {
            let neighbour = scope.spawn(|| {
                let other = rustix::process::Uid::from_raw(1000);
                // Only for this thread.
                rustix::thread::set_thread_res_uid(other, other, other).unwrap();
                let silent = connect();
                (silent, prove(&connect(), name, &secret(2), &deadline).unwrap_err())
            });
            let (silent, guess) = neighbour.join().unwrap();
            // A process that knows the key gets it, even if user IDs mean nothing.
            let known = connect();
            prove(&known, name, &secret(1), &deadline).unwrap();
            assert!(matches!(patiently(&known, &deadline, || receive(&known)).unwrap(), Reply::File(_)));
            assert_eq!(receive(&silent).err(), Some(Errno::AGAIN), "it was let in, and got nothing");
            guess
        });
        assert!(guess.to_string().contains("a different secret"), "{guess}");
        drop(leader.stdin.take());
        lines.for_each(drop);
        assert!(leader.wait().unwrap().success());
    }

    #[test]
    fn silent_clients_hold_up_nobody() {
        with_server(&secret(1), |name| {
            let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
            let silent: Vec<OwnedFd> = (0..3 * admission::MEMORY.most)
                .map(|number| {
                    let pending = socket(SocketFlags::CLOEXEC).unwrap();
                    rustix::net::connect(&pending, &address).unwrap();
                    let words: &[u8] = [b"".as_slice(), b"GET / HTTP/1.1\r\n\r\n", b"colprove\x01\x03"][number % 3];
                    // It may already have been dropped.
                    let _ = send(&pending, words);
                    pending
                })
                .collect();
            assert!(fetch(name, &secret(1), &Deadline::after(Duration::from_secs(10))).is_ok());
            drop(silent);
        });
    }

    #[test]
    fn a_client_that_hangs_up_disturbs_nobody() {
        with_server(&secret(1), |name| {
            let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
            for _ in 0..50 {
                rustix::net::connect(socket(SocketFlags::CLOEXEC).unwrap(), &address).unwrap();
            }
            assert!(fetch(name, &secret(1), &Deadline::after(Duration::from_secs(10))).is_ok());
        });
    }

    #[test]
    fn a_server_that_is_gone_or_silent_is_an_error() {
        let deadline = Deadline::after(Duration::from_millis(20));
        let gone = DescriptorServer::open(&secret(1)).unwrap().name().to_owned();
        assert_eq!(fetch(&gone, &secret(1), &deadline).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
        let silent = DescriptorServer::open(&secret(1)).unwrap();
        assert_eq!(fetch(silent.name(), &secret(1), &deadline).unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert!(fetch(&"x".repeat(200), &secret(1), &deadline).is_err());
        assert_ne!(silent.name(), DescriptorServer::open(&secret(1)).unwrap().name());
    }
}
