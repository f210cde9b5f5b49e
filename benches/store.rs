//! The store through which ranks find each other: calls of one client, and of eight at once, to a server of this
//! process over the loopback interface.
//!
//! `cargo bench --bench store`. A `set` has no reply, so it is measured together with an `add` after it. A `get` sends
//! two requests, as PyTorch's clients do: whether the key exists, and then for its value.

mod common;

use std::time::Duration;

use collectives::store::{Store, TcpStore, TcpStoreServer};
use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};

const LONG: Duration = Duration::from_secs(20);

/// A client, and the number of its calls, which is the same for all clients of a benchmark.
struct Client {
    index: usize,
    store: std::sync::Arc<TcpStore>,
    calls: u64,
}

fn clients(server: &TcpStoreServer, count: usize) -> Vec<Client> {
    let port = server.local_addr().port();
    let connect = || TcpStore::connect("127.0.0.1", port, LONG).expect("the server is there");
    (0..count).map(|index| Client { index, store: connect(), calls: 0 }).collect()
}

/// A call of a client; the number is that of all clients.
type Call = fn(&Client, usize);

const CALLS: [(&str, Call); 6] = [
    ("add", |client, _| assert!(client.store.add(&format!("number {}", client.index), 1).expect("an add") > 0)),
    ("set and add", |client, _| {
        client.store.set(&format!("key {}", client.index), &client.calls.to_le_bytes()).expect("a set");
        assert!(client.store.add("sets", 1).expect("an add") > 0);
    }),
    ("get", |client, _| assert_eq!(client.store.get("value", LONG).expect("a get"), [7; 128])),
    ("wait", |client, _| client.store.wait(&["value", "other"], LONG).expect("both are there")),
    ("compare_set", |client, _| assert_eq!(client.store.compare_set("other", b"b", b"c").expect("an answer"), b"a")),
    ("barrier", |client, count| {
        client.store.barrier(&format!("barrier {}", client.calls), count, LONG).expect("all come");
    }),
];

fn calls(criterion: &mut Criterion) {
    for count in [1, 8] {
        let server = TcpStoreServer::bind("127.0.0.1:0").expect("a free port");
        let mut clients = clients(&server, count);
        clients[0].store.multi_set(&[("value", &[7; 128]), ("other", b"a")]).expect("the keys");
        let mut group = criterion.benchmark_group(format!("{count} clients"));
        for (name, call) in CALLS {
            group.bench_function(BenchmarkId::from_parameter(name), |bencher| {
                bencher.iter_custom(|iterations| {
                    common::together(&mut clients, iterations, |_, client, _| {
                        call(client, count);
                        client.calls += 1;
                    })
                });
            });
        }
        group.finish();
        let sum: i64 = (0..count).map(|index| clients[0].store.add(&format!("number {index}"), 0).expect("a number")).sum();
        assert_eq!(sum % count as i64, 0, "every client has added as often");
    }
}

/// Measures one client's call beside idle clients: its cost must not depend on them.
fn beside_idle_clients(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("add beside idle clients");
    for idle in [0, 400] {
        let server = TcpStoreServer::bind("127.0.0.1:0").expect("a free port");
        let (idle_clients, client) = (clients(&server, idle), clients(&server, 1));
        group.bench_function(BenchmarkId::from_parameter(idle), |bencher| {
            bencher.iter(|| assert!(client[0].store.add("number", 1).expect("an add") > 0));
        });
        drop(idle_clients);
    }
    group.finish();
}

/// Measures how one client sets a key that the other waits for, gets and deletes, and the reverse.
fn handing_over(criterion: &mut Criterion) {
    let server = TcpStoreServer::bind("127.0.0.1:0").expect("a free port");
    let mut clients = clients(&server, 2);
    criterion.bench_function("a key there and back", |bencher| {
        bencher.iter_custom(|iterations| {
            common::together(&mut clients, iterations, |_, client, _| {
                let (give, take) = if client.index == 0 { ("there", "back") } else { ("back", "there") };
                let value = client.calls.to_le_bytes();
                if client.index == 0 {
                    client.store.set(give, &value).expect("a set");
                }
                assert_eq!(client.store.get(take, LONG).expect("the other sets it"), value);
                client.store.delete_key(take).expect("it was there");
                if client.index == 1 {
                    client.store.set(give, &value).expect("a set");
                }
                client.calls += 1;
            })
        });
    });
}

criterion_group! {
    name = benches;
    config = common::criterion();
    targets = calls, handing_over, beside_idle_clients
}
criterion_main!(benches);
