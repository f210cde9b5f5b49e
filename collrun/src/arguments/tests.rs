use super::*;

fn read(line: &str) -> Result<Arguments, clap::Error> {
    let words = std::iter::once("collrun").chain(line.split_whitespace());
    Arguments::from_arg_matches(&Arguments::spelled_both_ways().try_get_matches_from(words)?)
}

fn parsed(line: &str) -> Arguments {
    read(line).unwrap()
}

fn place(line: &str) -> Result<Place, String> {
    parsed(&format!("{line} p")).place()
}

#[test]
fn the_program_keeps_its_flags() {
    for line in ["--nproc-per-node 3 prog -x --nnodes 7 --", "--nproc_per_node=3 -- prog -x --nnodes 7 --"] {
        let arguments = parsed(line);
        assert_eq!(arguments.command, ["prog", "-x", "--nnodes", "7", "--"]);
        assert_eq!((arguments.nproc_per_node, arguments.nnodes.most), (Some(Count::Number(3)), 1));
    }
}

#[test]
fn a_flag_that_is_none_is_no_program() {
    for line in ["--nproc-per-rank 3 prog", "--frobnicate", "-q prog", "--nproc_per-node 3 prog"] {
        let error = read(line).unwrap_err().to_string();
        assert!(error.contains("unexpected argument"), "{line}: {error}");
    }
}

#[test]
fn several_hosts_need_to_know_where_they_meet() {
    let among = |node, address: &str, port| Ok(Place::Among { node, address: address.into(), port });
    assert_eq!(place("--nnodes 2 --node-rank 1 --master-addr a --master-port 5"), among(1, "a", 5));
    assert_eq!(place("--nnodes 2 --node-rank 1 --master-addr [::1] --master-port 5"), among(1, "::1", 5));
    assert_eq!(place("--nnodes 2:2 --node-rank 1 --rdzv-endpoint a"), among(1, "a", 29500));
    assert_eq!(place("--nnodes 2 --rdzv-endpoint a:7 --rdzv-backend c10d"), Ok(Place::Unnumbered { address: "a".into(), port: 7 }));
    assert!(place("--nnodes 2 --master-addr a --master-port 5").unwrap_err().contains("--node-rank"));
    assert!(place("--nnodes 2 --rdzv-endpoint a:7 --rdzv-backend static").unwrap_err().contains("--node-rank"));
    assert!(place("--nnodes 2 --node-rank 0 --master-port 5").unwrap_err().contains("--master-addr"));
    assert!(place("--nnodes 2 --node-rank 0 --master-addr a").unwrap_err().contains("--master-port"));
    assert!(place("--nnodes 2 --node-rank 2 --master-addr a --master-port 5").is_err());
    assert!(place("--node-rank 1").is_err());
    assert!(place("--standalone --nnodes 2").is_err());
    assert_eq!(place("--standalone --rdzv-endpoint a:7"), Ok(Place::Alone { address: None, port: None }));
}

#[test]
fn a_range_of_hosts_meets_at_an_endpoint() {
    assert_eq!(place("--nnodes 1:4 --rdzv-endpoint a:7"), Ok(Place::Elastic { address: "a".into(), port: 7 }));
    assert_eq!(place("--nnodes 1:4 --rdzv-endpoint a --rdzv-backend c10d"), Ok(Place::Elastic { address: "a".into(), port: 29500 }));
    for (line, words) in [
        ("--nnodes 1:4", "--rdzv-endpoint is needed"),
        ("--nnodes 1:4 --master-addr a --master-port 7", "--rdzv-endpoint is needed"),
        ("--nnodes 1:4 --rdzv-endpoint a:0", "name a port"),
        ("--nnodes 1:4 --rdzv-endpoint a --node-rank 1", "leave out --node-rank"),
        ("--nnodes 1:4 --rdzv-endpoint a --rdzv-backend static", "give --rdzv-backend c10d"),
        ("--nnodes 1:4 --rdzv-endpoint a --keep-going", "--keep-going"),
        ("--nnodes 1:4 --rdzv-endpoint a -n 2", "-n 2"),
        ("--nnodes 1:4 --standalone", "--standalone --nnodes 1:4"),
    ] {
        let said = place(line).unwrap_err();
        assert!(said.contains(words), "{line}: {said}");
    }
}

#[test]
fn endpoints_are_hosts_and_ports() {
    let read = |text| address_and_port(text, None);
    assert_eq!(read("a:7"), Ok(("a".into(), 7)));
    assert_eq!(read("[::1]:7"), Ok(("::1".into(), 7)));
    assert_eq!(read("[::1]"), Ok(("::1".into(), 29500)));
    assert_eq!(read("fe80::1"), Ok(("fe80::1".into(), 29500)));
    assert_eq!(read("fe80::1%eth0"), Ok(("fe80::1%eth0".into(), 29500)));
    assert_eq!(read("[fe80::1%eth0]:7"), Ok(("fe80::1%eth0".into(), 7)));
    assert_eq!(address_and_port("a", Some(4)), Ok(("a".into(), 4)));
    assert!(place("--nnodes 2 --rdzv-endpoint a:0").unwrap_err().contains("name a port"));
    assert_eq!(place("--rdzv-endpoint a:0"), Ok(Place::Alone { address: Some("a".into()), port: Some(0) }));
    for wrong in ["a:", "a:x", "a:65536", ":7"] {
        assert!(read(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn what_ends_in_py_is_python_s() {
    let words = |line: &str| {
        let (program, arguments) = parsed(line).program();
        std::iter::once(program).chain(arguments).map(|word| word.into_string().unwrap()).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(words("train.py --lr 1"), "python3 -u train.py --lr 1");
    assert_eq!(words("-m train.main -x"), "python3 -u -m train.main -x");
    assert_eq!(words("--run-path /a/train"), "python3 -u /a/train");
    assert_eq!(words("--no-python ./train.py"), "./train.py");
    assert_eq!(words("./train -m"), "./train -m");
}

#[test]
fn nonsense_is_refused() {
    let lines = "|--nproc-per-node 0 p|--nproc-per-node -1 p|--nproc-per-node all p|--grace -1 p|--grace x p|--grace 1e99 p|--master-port 0 p|\
        --nnodes 2:1 p|--nnodes 0 p|--nnodes 2: p|--rdzv-backend etcd p|--rdzv-conf is_host=1 p|--redirects 4 p|--signals-to-handle SIGKILL p|\
        --max-restarts -1 p|--max-restarts 1 --keep-going p|-m --no-python p|--local-ranks-filter a p";
    for line in lines.split('|') {
        assert!(read(line).is_err(), "{line}");
    }
}
