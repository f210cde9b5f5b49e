//! Properties that must hold for any bytes that reach the rendezvous: requests, answers, store files, URLs, and
//! launchers' variables.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::time::Duration;

use arbitrary::Unstructured;

use super::file::{Access, FileStore, Log};
use super::launcher::{self, Launch};
use super::protocol::{Expect, MAGIC, Reply, ReplyDecoder, RequestDecoder, StoreRequest, encode, encode_keys, push_bytes, query};
use super::service::{ClientId, Service};
use super::store::Store;
use super::url::{Method, Rendezvous};
use crate::base::deadline::Deadline;
use crate::call::algorithm::{Algorithm, AlgorithmRanges};
use crate::config::{Config, Transport};

/// Checks that any bytes, taken as a client's requests, decode to the same result however they are split, and encode to
/// the same bytes again.
pub fn store_requests(data: &[u8]) {
    let whole = decode_requests(data, data.len().max(1));
    for step in [1, 3, 64] {
        assert_eq!(decode_requests(data, step), whole, "in parts of {step}");
    }
    let again: Vec<u8> = whole.0.iter().flat_map(request_bytes).collect();
    assert_eq!(again, data[..again.len()], "encoded again");
}

/// Returns the requests in `data` as it arrives in parts, and why there are no more.
fn decode_requests(data: &[u8], step: usize) -> (Vec<StoreRequest>, Option<String>) {
    let (mut decoder, mut found) = (RequestDecoder::default(), Vec::new());
    for part in data.chunks(step) {
        decoder.push(part);
        loop {
            match decoder.next() {
                Ok(Some(request)) => found.push(request),
                Ok(None) => break,
                Err(malformed) => return (found, Some(malformed.0)),
            }
        }
    }
    (found, None)
}

/// Encodes a request as a client sends it.
fn request_bytes(request: &StoreRequest) -> Vec<u8> {
    let several = |code, keys: &[Vec<u8>]| encode_keys(code, keys.len(), keys.iter().map(Vec::as_slice));
    match request {
        StoreRequest::Validate => [&[query::VALIDATE][..], &MAGIC.to_le_bytes()].concat(),
        StoreRequest::Set { key, value } => encode(query::SET, &[key, value], None),
        StoreRequest::CompareSet { key, expected, desired } => encode(query::COMPARE_SET, &[key, expected, desired], None),
        StoreRequest::Get { key } => encode(query::GET, &[key], None),
        StoreRequest::Add { key, delta } => encode(query::ADD, &[key], Some(*delta)),
        StoreRequest::Check { keys } => several(query::CHECK, keys),
        StoreRequest::Wait { keys } => several(query::WAIT, keys),
        StoreRequest::NumKeys => vec![query::NUM_KEYS],
        StoreRequest::DeleteKey { key } => encode(query::DELETE_KEY, &[key], None),
        StoreRequest::Append { key, value } => encode(query::APPEND, &[key, value], None),
        StoreRequest::MultiGet { keys } => several(query::MULTI_GET, keys),
        StoreRequest::MultiSet { pairs } => {
            let texts = pairs.iter().flat_map(|(key, value)| [key.as_slice(), value]);
            encode_keys(query::MULTI_SET, pairs.len(), texts)
        }
        StoreRequest::CancelWait => vec![query::CANCEL_WAIT],
        StoreRequest::Ping { nonce } => [&[query::PING][..], &nonce.to_le_bytes()].concat(),
        StoreRequest::QueuePush { key, value } => encode(query::QUEUE_PUSH, &[key, value], None),
        StoreRequest::QueuePop { key } => encode(query::QUEUE_POP, &[key], None),
        StoreRequest::QueueLen { key } => encode(query::QUEUE_LEN, &[key], None),
        StoreRequest::ListKeys => vec![query::LIST_KEYS],
        StoreRequest::Barrier { key, world_size } => encode(query::BARRIER, &[key], Some(*world_size)),
    }
}

/// Checks that any bytes, taken as a server's answer, decode to the same result however they are split, and encode to
/// the same bytes again. The first two bytes select the request.
pub fn store_replies(data: &[u8]) {
    let Some(([kind, count], data)) = data.split_first_chunk() else { return };
    let expect = match kind % 6 {
        0 => Expect::Flag,
        1 => Expect::Nonce,
        2 => Expect::Number,
        3 => Expect::Values(usize::from(*count)),
        4 => Expect::Popped,
        _ => Expect::Keys,
    };
    let whole = decode_reply(expect, data, data.len().max(1));
    for step in [1, 3, 64] {
        assert_eq!(decode_reply(expect, data, step), whole, "in parts of {step}");
    }
    if let Ok(Some((reply, rest))) = whole {
        let taken = &data[..data.len() - rest.len()];
        assert_eq!(data[taken.len()..], rest);
        // The number of values in a queue is not kept, only whether it holds any.
        let checked = if let Reply::Popped(_) = reply { &taken[8..] } else { taken };
        assert_eq!(reply_bytes(&reply), checked, "encoded again");
    }
}

/// An answer and the bytes after it.
type Replied = Result<Option<(Reply, Vec<u8>)>, String>;

/// Returns the answer in `data` as it arrives in parts.
fn decode_reply(expect: Expect, data: &[u8], step: usize) -> Replied {
    let mut decoder = ReplyDecoder::new(expect);
    // Pushes once without bytes: an answer without fields is complete from the start.
    let mut at = 0;
    loop {
        let part = &data[at..(at + step).min(data.len())];
        at += part.len();
        match decoder.push(part) {
            Ok(Some((reply, rest))) => return Ok(Some((reply, [rest.as_slice(), &data[at..]].concat()))),
            Ok(None) if at == data.len() => return Ok(None),
            Ok(None) => {}
            Err(malformed) => return Err(malformed.0),
        }
    }
}

/// Encodes an answer as a server sends it, without the number before a queue's value.
fn reply_bytes(reply: &Reply) -> Vec<u8> {
    let mut bytes = Vec::new();
    match reply {
        Reply::Flag(flag) => bytes.push(*flag),
        Reply::Nonce(nonce) => bytes.extend(nonce.to_le_bytes()),
        Reply::Number(number) => bytes.extend(number.to_le_bytes()),
        Reply::Values(values) => values.iter().for_each(|value| push_bytes(&mut bytes, value)),
        Reply::Popped(value) => value.iter().for_each(|value| push_bytes(&mut bytes, value)),
        Reply::Keys(keys) => {
            bytes.extend((keys.len() as u64).to_le_bytes());
            keys.iter().for_each(|key| push_bytes(&mut bytes, key));
        }
    }
    bytes
}

/// Checks that a text that parses as a rendezvous URL can be written again and means the same.
pub fn urls(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    match text.parse::<Rendezvous>() {
        Ok(mut rendezvous) => {
            assert!(rendezvous.timeout.is_none_or(|timeout| !timeout.is_zero()));
            // Beyond some days, the digits of a number do not hold its nanoseconds.
            rendezvous.timeout = rendezvous.timeout.filter(|timeout| timeout.as_secs() < 1 << 20);
            let url = url_text(&rendezvous);
            let again = url.parse::<Rendezvous>().unwrap_or_else(|error| panic!("{url}, written from {text:?}: {error}"));
            assert_eq!(again, rendezvous, "{url}, written from {text:?}");
            assert_ne!(rendezvous.world_size, Some(0));
        }
        Err(error) => assert!(error.to_string().contains("rendezvous URL"), "{error}"),
    }
}

/// Writes a rendezvous as a URL.
fn url_text(rendezvous: &Rendezvous) -> String {
    let place = match &rendezvous.method {
        Method::Env => "env://".to_owned(),
        Method::Tcp { host, port } if host.contains(':') => format!("tcp://[{host}]:{port}"),
        Method::Tcp { host, port } => format!("tcp://{host}:{port}"),
        Method::File { path } => format!("file://localhost{}", path.display()),
    };
    let rank = rendezvous.rank.map(|rank| format!("rank={rank}"));
    let world_size = rendezvous.world_size.map(|size| format!("world_size={size}"));
    let timeout = rendezvous.timeout.map(|timeout| format!("timeout={}.{:09}", timeout.as_secs(), timeout.subsec_nanos()));
    let query: Vec<String> = [rank, world_size, timeout].into_iter().flatten().collect();
    if query.is_empty() { place } else { format!("{place}?{}", query.join("&")) }
}

/// Takes lines of `NAME=value` as a launcher's variables. The result is within its limits. If it is written as `RANK`,
/// `WORLD_SIZE` and similar variables, it means the same.
pub fn launchers(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let variables: Vec<(&str, &str)> = text.lines().filter_map(|line| line.split_once('=')).collect();
    let read = |name: &str| variables.iter().rev().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned());
    let Ok(launch) = launcher::detect(&read, 1) else { return };
    assert!(launch.world_size > 0 && !launch.address.is_empty() && !launch.prefix.is_empty());
    assert!(launch.local_world_size.is_none_or(|size| size <= launch.world_size && launch.local_rank.is_none_or(|rank| rank < size)));
    let plain = |name: &str| match name {
        "RANK" => Some(launch.rank.to_string()),
        "WORLD_SIZE" => Some(launch.world_size.to_string()),
        "LOCAL_RANK" => launch.local_rank.map(|rank| rank.to_string()),
        "LOCAL_WORLD_SIZE" => launch.local_world_size.map(|size| size.to_string()),
        "MASTER_ADDR" => Some(format!("[{}]", launch.address)),
        "MASTER_PORT" => Some(launch.port.to_string()),
        "TORCHELASTIC_USE_AGENT_STORE" | "TORCHELASTIC_RESTART_COUNT" => read(name),
        _ => None,
    };
    let again = launcher::detect(&plain, 2).unwrap_or_else(|error| panic!("{launch:?} said plainly: {error}"));
    let agent_store = again.agent_store;
    let Launch { launcher, agent_store: is_served, several_hosts, .. } = launch;
    assert_eq!(Launch { launcher, agent_store: is_served, several_hosts, ..again }, launch);
    assert!(agent_store || !launch.agent_store);
}

/// Takes lines of `NAME=value` as the variables for settings that a communicator's code leaves open.
pub fn settings(data: &[u8]) {
    let mut unstructured = Unstructured::new(data);
    let is_set = unstructured.arbitrary::<bool>().unwrap_or_default();
    let text = String::from_utf8_lossy(unstructured.take_rest()).into_owned();
    let read = |name: &str| text.lines().filter_map(|line| line.split_once('=')).find(|(known, _)| *known == name);
    let start = if is_set {
        Config {
            transport: Transport::Shm,
            algorithms: AlgorithmRanges::new().with(Algorithm::Ring, ..).expect("a range"),
            ..Config::default()
        }
    } else {
        Config::default()
    };
    match start.clone().with_variables(&|name| read(name).map(|(_, value)| value.to_owned())) {
        Ok(config) if is_set => assert_eq!((config.transport, config.algorithms), (start.transport, start.algorithms)),
        Ok(config) => {
            let ranges = read("COLLECTIVES_ALGORITHM").and_then(|(_, value)| value.parse().ok()).unwrap_or_default();
            assert_eq!(config.algorithms, ranges);
        }
        Err(error) => assert!(error.to_string().contains("COLLECTIVES_"), "{error}"),
    }
}

/// A limit long enough to take a lock that no other process wants.
const LOCK_LIMIT: Duration = Duration::from_secs(5);

/// Checks that any bytes, taken as a store's file, give either an error or records. If the records are written again,
/// they must mean the same. A store then works on the file.
pub fn file_log(data: &[u8]) {
    let (file, path) = memory_file(data);
    let mut log = Log::default();
    match log.open(&path, Access::Read, &Deadline::after(LOCK_LIMIT)) {
        Err(error) => assert!(error.to_string().contains("store file"), "{error}"),
        Ok(_) => check_records(&log),
    }
    // Half a record, or a counter that is not a number, is an error of every call.
    if let Ok(store) = FileStore::open(&path, None, LOCK_LIMIT) {
        store.set("key", b"value").expect("a store that opens can be written");
        assert_eq!(store.get("key", Duration::ZERO).expect("just set"), b"value");
        let listed = store.list_keys().expect("readable");
        assert!(listed.iter().any(|key| key == "key"));
        let _ = store.add("number", 1);
        assert!(store.delete_key("key").expect("still there") && !store.check(&["key"]).expect("readable"));
    }
    drop(file);
}

/// Writes the records to another file, which must then contain the same.
fn check_records(log: &Log) {
    let records = |log: &Log| log.keys().map(|key| (key.to_vec(), log.value(key).map(<[u8]>::to_vec))).collect::<BTreeMap<_, _>>();
    let expected = records(log);
    let (file, path) = memory_file(&[]);
    let mut writer = Log::default();
    let opened = writer.open(&path, Access::Existing, &Deadline::after(LOCK_LIMIT)).and_then(|opened| opened.present(&path));
    let mut target = opened.expect("an empty file is a store");
    // One at a time: records read before are not read again.
    for (key, value) in &expected {
        writer.append(&mut target, &path, &[(key, value.as_deref().unwrap_or_default())]).expect("written");
    }
    drop(target);
    let mut reader = Log::default();
    reader.open(&path, Access::Read, &Deadline::after(LOCK_LIMIT)).expect("what was written can be read");
    assert!(records(&writer) == expected && records(&reader) == expected, "read again");
    drop(file);
}

/// Creates an unnamed file, which disappears when it is closed, and a path to it.
fn memory_file(content: &[u8]) -> (File, PathBuf) {
    let file = rustix::fs::memfd_create("store", rustix::fs::MemfdFlags::CLOEXEC).expect("memory for a file");
    let mut file = File::from(file);
    file.write_all(content).expect("memory for a file");
    let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    (file, path)
}

/// The client that behaves correctly.
const WITNESS: ClientId = 9;
/// The number of other clients.
const CLIENTS: ClientId = 3;

/// Serves several clients. Each part of the input consists of a byte that selects the client, a byte that gives a
/// length, and as many bytes as this length says. Checks that the answers do not depend on how a part is split. A
/// client that was refused stays refused, and one that behaves correctly is served to the end.
pub fn store_service(data: &[u8]) {
    let mut whole = serve(data, usize::MAX);
    let mut split = serve(data, 1);
    if data.contains(&query::LIST_KEYS) {
        // Keys come in no particular order.
        whole.iter_mut().chain(&mut split).for_each(|(answers, _)| answers.sort_unstable());
    }
    assert_eq!(whole, split, "byte by byte");
}

/// The answers that each client received, and why it was refused.
type Answers = Vec<(Vec<u8>, Option<String>)>;

fn serve(mut data: &[u8], step: usize) -> Answers {
    let mut service = Service::default();
    let mut told: Answers = vec![Default::default(); CLIENTS as usize];
    service.connect(WITNESS);
    service.receive(WITNESS, &validate());
    for id in 0..CLIENTS {
        service.connect(id);
        service.receive(id, &validate());
    }
    while let Some(([client, length], rest)) = data.split_first_chunk() {
        let (bytes, rest) = rest.split_at(rest.len().min(usize::from(*length)));
        data = rest;
        let id = ClientId::from(*client) % CLIENTS;
        bytes.chunks(step.min(bytes.len().max(1))).for_each(|part| service.receive(id, part));
        // Clients disconnect at the highest client bytes.
        if *client >= 0xf0 {
            collect(&mut service, &mut told);
            service.disconnect(id);
            service.connect(id);
            service.receive(id, &validate());
        }
        collect(&mut service, &mut told);
    }
    check_witness(&mut service);
    (0..CLIENTS).for_each(|id| service.disconnect(id));
    assert!(service.serves_one_that_waits_for_nothing());
    check_witness(&mut service);
    told
}

/// Takes the answers. A client that was refused is no longer read from.
fn collect(service: &mut Service, told: &mut Answers) {
    for (id, (answers, refusal)) in (0..).zip(told) {
        while !service.unsent(id).is_empty() {
            answers.extend_from_slice(service.unsent(id));
            let unsent = service.unsent(id).len();
            service.sent(id, unsent);
        }
        if let Some(reason) = service.refusal(id) {
            assert!(!service.wants_input(id) && !reason.is_empty());
            *refusal = Some(reason.to_owned());
        }
    }
}

/// Checks that the correct client is answered.
fn check_witness(service: &mut Service) {
    service.receive(WITNESS, &[&[query::PING][..], &7_u32.to_le_bytes()].concat());
    assert_eq!(service.unsent(WITNESS), 7_u32.to_le_bytes());
    service.sent(WITNESS, 4);
    assert!(service.wants_input(WITNESS));
}

fn validate() -> Vec<u8> {
    [&[query::VALIDATE][..], &MAGIC.to_le_bytes()].concat()
}

/// Returns initial inputs: valid bytes of clients, servers, users and launchers.
pub(crate) fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let mut seeds: Vec<(&'static str, Vec<u8>)> = Vec::new();
    let requests = requests();
    seeds.push(("store_requests", requests.concat()));
    seeds.extend(requests.iter().map(|request| ("store_requests", request.clone())));
    for clients in 1..=3_u8 {
        let part = |(at, request): (usize, &Vec<u8>)| [&[at as u8 % clients, request.len() as u8][..], request].concat();
        let parts: Vec<Vec<u8>> = requests.iter().enumerate().skip(1).map(part).collect();
        seeds.push(("store_service", parts.concat()));
        seeds.push(("store_service", parts.iter().rev().flatten().copied().collect()));
    }
    let values = Reply::Values(vec![b"value".to_vec(), Vec::new()]);
    let replies = [(0, Reply::Flag(1)), (1, Reply::Nonce(7)), (2, Reply::Number(-3)), (3, values), (5, Reply::Keys(vec![b"/a".to_vec()]))];
    seeds.extend(replies.iter().map(|(kind, reply)| ("store_replies", [&[*kind, 2][..], &reply_bytes(reply)].concat())));
    seeds.push(("store_replies", [&[4, 0][..], &1_u64.to_le_bytes(), &reply_bytes(&Reply::Popped(Some(b"value".to_vec())))].concat()));
    let text = |name, text: &str| (name, text.as_bytes().to_vec());
    seeds.extend(
        [
            "env://?rank=1&world_size=2",
            "tcp://node-1:1234?rank=3&world_size=4&timeout=2.5",
            "tcp://[fe80::1%eth0]:99/",
            "file:///a b?rank=0",
        ]
        .map(|url| text("urls", url)),
    );
    seeds.extend(
        [
            "RANK=1\nWORLD_SIZE=4\nLOCAL_RANK=1\nLOCAL_WORLD_SIZE=2\nMASTER_ADDR=[::1]\nMASTER_PORT=29500\nTORCHELASTIC_USE_AGENT_STORE=True\n\
             TORCHELASTIC_RESTART_COUNT=2\nTORCHELASTIC_RUN_ID=x",
            "OMPI_COMM_WORLD_RANK=1\nOMPI_COMM_WORLD_SIZE=2\nOMPI_COMM_WORLD_LOCAL_RANK=1\nOMPI_COMM_WORLD_LOCAL_SIZE=2\nPMIX_NAMESPACE=a@1",
            "PMI_RANK=1\nPMI_SIZE=3\nMPI_LOCALRANKID=1\nMPI_LOCALNRANKS=3\nPMI_JOBID=7",
            "SLURM_PROCID=3\nSLURM_STEP_NUM_TASKS=4\nSLURM_LOCALID=1\nSLURM_NODEID=1\nSLURM_STEP_ID=0\nSLURM_JOB_ID=8\n\
             SLURM_STEP_TASKS_PER_NODE=2(x2),1\nSLURM_STEP_NODELIST=node[07-08,10]",
            "JOB_COMPLETION_INDEX=1\nWORLD_SIZE=3\nMASTER_ADDR=train-0.train",
        ]
        .map(|variables| text("launchers", variables)),
    );
    let variables = "COLLECTIVES_TRANSPORT=tcp\nCOLLECTIVES_TIMEOUT=1.5\nCOLLECTIVES_LISTEN_ADDRESS=::1\nCOLLECTIVES_REPRODUCIBLE=1";
    seeds.extend(["\0", "\u{1}"].map(|first| text("settings", &format!("{first}{variables}"))));
    seeds.push(text("settings", "\0COLLECTIVES_ALGORITHM=ring:16K-\nCOLLECTIVES_HOST_IDENTITY=a"));
    let records: [(&[u8], &[u8]); 4] = [(b"refcount/", b"1"), (b"/key", b"value"), (b"/number", b"7"), (b"-/key", b"")];
    let texts = records.iter().flat_map(|(key, value)| [*key, *value]);
    seeds.push(("file_log", texts.flat_map(|text| [&(text.len() as u32).to_le_bytes()[..], text].concat()).collect()));
    seeds
}

/// Returns one request of each kind.
fn requests() -> Vec<Vec<u8>> {
    let (key, value) = (b"/key".to_vec(), b"12".to_vec());
    let keys = vec![key.clone(), b"/other".to_vec()];
    let requests = [
        StoreRequest::Validate,
        StoreRequest::Set { key: key.clone(), value: value.clone() },
        StoreRequest::CompareSet { key: key.clone(), expected: value.clone(), desired: b"13".to_vec() },
        StoreRequest::Get { key: key.clone() },
        StoreRequest::Add { key: key.clone(), delta: -1 },
        StoreRequest::Check { keys: keys.clone() },
        StoreRequest::Wait { keys: keys.clone() },
        StoreRequest::NumKeys,
        StoreRequest::DeleteKey { key: key.clone() },
        StoreRequest::Append { key: b"/other".to_vec(), value: value.clone() },
        StoreRequest::MultiGet { keys: keys.clone() },
        StoreRequest::MultiSet { pairs: vec![(key.clone(), value.clone()), (b"/other".to_vec(), Vec::new())] },
        StoreRequest::CancelWait,
        StoreRequest::Ping { nonce: 5 },
        StoreRequest::QueuePush { key: b"/queue".to_vec(), value },
        StoreRequest::QueueLen { key: b"/queue".to_vec() },
        StoreRequest::Wait { keys: vec![b"/queue".to_vec()] },
        StoreRequest::QueuePop { key: b"/queue".to_vec() },
        StoreRequest::ListKeys,
        StoreRequest::Barrier { key: b"/barrier".to_vec(), world_size: 3 },
    ];
    requests.iter().map(request_bytes).collect()
}
