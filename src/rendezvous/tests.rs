//! Tests of stores against each other, and of whole start-ups.

use std::collections::BTreeSet;

use super::*;
use ports::free_port;

#[path = "../../tests/common/ports.rs"]
#[allow(unreachable_pub, reason = "the integration tests share it")]
mod ports;

const LONG: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(20);

/// Returns a reader of these variables.
fn reader(pairs: &[(&str, String)]) -> impl Fn(&str) -> Option<String> + use<> {
    let pairs: Vec<(String, String)> = pairs.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
    move |name| pairs.iter().find(|(other, _)| other == name).map(|(_, value)| value.clone())
}

fn nothing(_: &str) -> Option<String> {
    None
}

/// Every store answers the same questions in the same way.
#[test]
fn all_stores_agree() {
    let folder = tempfile::tempdir().unwrap();
    let server = TcpStoreServer::bind("127.0.0.1:0").unwrap();
    let memory: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let stores: Vec<(&str, Arc<dyn Store>)> = vec![
        ("file", Arc::new(FileStore::open(folder.path().join("store"), Some(1), LONG).unwrap())),
        ("tcp", TcpStore::connect("127.0.0.1", server.local_addr().port(), LONG).unwrap()),
        ("prefix", Arc::new(PrefixStore::new("p", Arc::clone(&memory)))),
        ("memory", memory),
    ];
    for (name, store) in &stores {
        let queues = *name != "file";
        store.set("k", b"\x00\xff").unwrap();
        assert_eq!(store.get("k", Duration::ZERO).unwrap(), b"\x00\xff", "{name}");
        assert_eq!(store.add("n", -3).unwrap(), -3, "{name}");
        assert_eq!(store.add("n", 0).unwrap(), -3, "{name}");
        assert_eq!(store.get("n", Duration::ZERO).unwrap(), b"-3", "{name}");
        assert_eq!(store.compare_set("k", b"no", b"x").unwrap(), b"\x00\xff", "{name}");
        assert_eq!(store.compare_set("none", b"no", b"x").unwrap(), b"no", "{name}");
        assert!(!store.check(&["none"]).unwrap(), "{name}");
        assert_eq!(store.compare_set("none", b"", b"x").unwrap(), b"x", "{name}");
        assert!(store.delete_key("none").unwrap() && !store.delete_key("none").unwrap(), "{name}");
        store.append("a", b"x").unwrap();
        store.append("a", b"y").unwrap();
        store.multi_set(&[("m", b"1"), ("", b"empty key")]).unwrap();
        let values = store.multi_get(&["", "a", "m"], Duration::ZERO).unwrap();
        assert_eq!(values, [b"empty key".to_vec(), b"xy".to_vec(), b"1".to_vec()], "{name}");
        let keys: BTreeSet<String> = store.list_keys().unwrap().into_iter().filter(|key| !key.starts_with("p/")).collect();
        assert_eq!(keys, ["", "a", "k", "m", "n"].map(str::to_owned).into(), "{name}");
        assert!(store.num_keys().unwrap() >= 5, "{name}");
        assert!(matches!(store.set(&"k".repeat(9000), b""), Err(Error::InvalidArgument { .. })), "{name}");
        assert!(matches!(store.barrier("b", 0, LONG), Err(Error::InvalidArgument { .. })), "{name}");
        store.barrier("b", 1, SHORT).unwrap();
        let error = store.wait(&["k", "late"], SHORT).unwrap_err();
        assert!(error.is_timeout() && error.to_string().contains("late"), "{name}: {error}");
        assert!(!error.to_string().contains("arrived"), "{name}: {error}");
        if queues {
            store.queue_push("q", b"1").unwrap();
            assert!(store.check(&["q"]).unwrap() && store.queue_len("q").unwrap() == 1, "{name}");
            assert_eq!(store.queue_pop("q", Duration::ZERO).unwrap(), b"1", "{name}");
            assert!(store.queue_pop("q", SHORT).unwrap_err().is_timeout(), "{name}");
        }
    }
    drop(stores);
}

#[test]
fn prefixes_are_joined_from_the_inside_out() {
    let memory = MemoryStore::new();
    let inner = Arc::new(PrefixStore::new("inner", Arc::new(memory.clone())));
    let outer = PrefixStore::new("outer", inner.clone());
    outer.set("k", b"v").unwrap();
    assert_eq!(memory.get("inner/outer/k", Duration::ZERO).unwrap(), b"v");
    memory.set("inner/other", b"").unwrap();
    memory.set("innermost", b"").unwrap();
    assert_eq!(outer.list_keys().unwrap(), ["k"]);
    assert_eq!(inner.list_keys().unwrap().len(), 2);
    assert_eq!(outer.num_keys().unwrap(), 3);
}

#[test]
fn threads_wait_for_each_other_in_memory() {
    let store = MemoryStore::new();
    let waiters: Vec<_> = (0..4)
        .map(|rank: i64| {
            let store = store.clone();
            std::thread::spawn(move || {
                store.add("sum", rank).unwrap();
                store.barrier("b", 5, LONG).unwrap();
                (store.add("sum", 0).unwrap(), store.queue_pop("q", LONG).unwrap())
            })
        })
        .collect();
    (0..4_u8).for_each(|value| store.queue_push("q", &[value]).unwrap());
    store.barrier("b", 5, LONG).unwrap();
    let mut popped: Vec<Vec<u8>> = waiters
        .into_iter()
        .map(|waiter| {
            let (sum, value) = waiter.join().unwrap();
            assert_eq!(sum, 6);
            value
        })
        .collect();
    popped.sort();
    assert_eq!(popped, [[0], [1], [2], [3]]);
}

/// Starts `size` threads that open the same rendezvous and exchange their ranks; returns the ranks that served.
fn start(size: usize, open: impl Fn(usize) -> Result<JobStore> + Sync) -> Vec<usize> {
    let servers = std::sync::Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for rank in 0..size {
            let (open, servers) = (&open, &servers);
            scope.spawn(move || {
                let met = open(rank).unwrap();
                assert_eq!((met.rank, met.world_size), (rank, size));
                met.store.set(&format!("rank/{rank}"), &[rank as u8]).unwrap();
                for other in 0..size {
                    assert_eq!(met.store.get(&format!("rank/{other}"), LONG).unwrap(), [other as u8]);
                }
                if met.server.is_some() {
                    servers.lock().unwrap().push(rank);
                }
            });
        }
    });
    servers.into_inner().unwrap()
}

#[test]
fn ranks_meet_by_tcp_url() {
    let port = free_port();
    let servers = start(5, |rank| {
        let met = connect(&format!("tcp://127.0.0.1:{port}?rank={rank}&world_size=5").parse()?, &Deadline::after(LONG), None, &nothing, 1)?;
        assert_eq!(met.local_address, Some("127.0.0.1".parse().unwrap()));
        Ok(met)
    });
    assert_eq!(servers, [0]);
}

#[test]
fn one_rank_needs_no_port() {
    let met = connect(&"tcp://127.0.0.1:0?rank=0&world_size=1".parse().unwrap(), &Deadline::after(LONG), None, &nothing, 1).unwrap();
    met.store.set("k", b"").unwrap();
    assert!(met.server.is_some());
    let error = connect(&"tcp://127.0.0.1:0?rank=0&world_size=2".parse().unwrap(), &Deadline::after(LONG), None, &nothing, 1).unwrap_err();
    assert!(error.to_string().contains("port 0"), "{error}");
}

#[test]
fn ranks_meet_by_file_url() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let servers = start(3, |rank| {
        let url = format!("file://{}?rank={rank}&world_size=3&timeout=15", path.display());
        let met = connect(&url.parse()?, &Deadline::after(LONG), None, &nothing, 1)?;
        assert_eq!(met.local_address, None);
        Ok(met)
    });
    assert!(servers.is_empty() && !path.exists());
}

#[test]
fn ranks_meet_by_variables() {
    let port = free_port();
    let servers = start(3, |rank| {
        let variables = [
            ("RANK", rank.to_string()),
            ("WORLD_SIZE", "3".to_owned()),
            ("LOCAL_RANK", rank.to_string()),
            ("LOCAL_WORLD_SIZE", "3".to_owned()),
            ("MASTER_ADDR", "localhost".to_owned()),
            ("MASTER_PORT", port.to_string()),
        ];
        connect(&Rendezvous::env(), &Deadline::after(LONG), None, &reader(&variables), 1)
    });
    assert_eq!(servers, [0]);
    // The URL may give what the variables do not.
    let variables = [("MASTER_ADDR", "127.0.0.1".to_owned()), ("MASTER_PORT", free_port().to_string())];
    let servers = start(2, |rank| {
        connect(&format!("env://?rank={rank}&world_size=2").parse()?, &Deadline::after(LONG), None, &reader(&variables), 1)
    });
    assert_eq!(servers, [0]);
}

#[test]
fn nobody_binds_where_the_agent_serves_and_a_restart_does_not_read_old_keys() {
    let agent = TcpStoreServer::bind("127.0.0.1:0").unwrap();
    let port = agent.local_addr().port();
    let variables = |rank: usize, attempt: usize| {
        reader(&[
            ("RANK", rank.to_string()),
            ("WORLD_SIZE", "2".to_owned()),
            ("MASTER_ADDR", "127.0.0.1".to_owned()),
            ("MASTER_PORT", port.to_string()),
            ("TORCHELASTIC_USE_AGENT_STORE", "True".to_owned()),
            ("TORCHELASTIC_RESTART_COUNT", attempt.to_string()),
        ])
    };
    for attempt in 0..2 {
        let met = connect(&Rendezvous::env(), &Deadline::after(LONG), None, &variables(0, attempt), 1).unwrap();
        assert!(!met.store.check(&["rank/0"]).unwrap() && met.store.list_keys().unwrap().is_empty(), "attempt {attempt}");
        drop(met);
        assert!(start(2, |rank| connect(&Rendezvous::env(), &Deadline::after(LONG), None, &variables(rank, attempt), 1)).is_empty());
    }
    // By URL it is the same store, and the same keys.
    let url = format!("tcp://127.0.0.1:{port}?rank=0&world_size=2").parse().unwrap();
    let met = connect(&url, &Deadline::after(LONG), None, &variables(0, 1), 1).unwrap();
    assert!(met.server.is_none());
    assert_eq!(met.store.get("rank/1", Duration::ZERO).unwrap(), [1]);
    let store = TcpStore::connect("127.0.0.1", port, LONG).unwrap();
    assert_eq!(store.get("collectives/attempt_0/rank/1", Duration::ZERO).unwrap(), [1]);
}

#[test]
fn what_a_url_lacks_is_said() {
    for (url, word) in [
        ("tcp://127.0.0.1?world_size=2", "rank is missing"),
        ("file:///tmp/store?rank=0", "world_size is missing"),
        ("env://", "RANK"),
        ("env://?rank=0", "WORLD_SIZE"),
        ("tcp://192.0.2.1?rank=0&world_size=2", "rank 0 must run on the host"),
    ] {
        let error = connect(&url.parse().unwrap(), &Deadline::after(SHORT), None, &nothing, 1).unwrap_err();
        assert!(matches!(error, Error::Config { .. }) && error.to_string().contains(word), "{url}: {error}");
    }
    let slurm = [("SLURM_PROCID", "0".to_owned()), ("SLURM_NTASKS", "1".to_owned())];
    let error = connect(&"env://?rank=1".parse().unwrap(), &Deadline::after(SHORT), None, &reader(&slurm), 1).unwrap_err();
    assert!(error.to_string().contains("neither") || error.to_string().contains("WORLD_SIZE"), "{error}");
}

/// A job's launch at this address, with `local_world_size` ranks on this host.
fn launch_at(address: &str, local_world_size: Option<usize>, agent_store: bool) -> Launch {
    Launch {
        rank: 0,
        world_size: 4,
        local_rank: None,
        local_world_size,
        several_hosts: None,
        address: address.to_owned(),
        port: 1,
        agent_store,
        prefix: String::new(),
        launcher: "RANK and WORLD_SIZE",
    }
}

#[test]
fn a_name_of_the_loopback_interface_is_refused_where_several_hosts_take_part_and_else_blamed() {
    let addresses = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect::<Vec<SocketAddr>>();
    let loopback = addresses(&["127.0.1.1:1"]);
    let of = |name: &str, local, agent, addresses: &[SocketAddr]| Confined::of(&launch_at(name, local, agent), addresses);
    let error = of("host1", Some(2), false, &loopback).unwrap_err().to_string();
    assert!(error.contains("MASTER_ADDR=\"host1\"") && error.contains("127.0.1.1") && error.contains("/etc/hosts"), "{error}");
    // One host, an address that others can reach, a launcher's own store, no known address.
    assert!(of("host1", Some(4), false, &loopback).unwrap().is_none());
    assert!(of("host1", Some(2), false, &addresses(&["127.0.1.1:1", "10.0.0.1:1"])).unwrap().is_none());
    assert!(of("host1", Some(2), true, &loopback).unwrap().is_none());
    assert!(of("host1", Some(2), false, &[]).unwrap().is_none());
    let late = || Error::Timeout { doing: "waiting".into(), elapsed: Duration::ZERO, missing: vec![], arrived: vec![], meanwhile: vec![] };
    for (name, words) in [("host1", "127.0.1.1"), ("127.0.0.1", "127.0.0.1 is a loopback address")] {
        let confined = of(name, None, false, &loopback).unwrap();
        let error = Confined::blame(confined.as_ref(), late()).to_string();
        assert!(error.contains(words) && error.contains("waiting"), "{error}");
    }
    assert!(!Confined::blame(None, late()).to_string().contains("loopback"));
}
