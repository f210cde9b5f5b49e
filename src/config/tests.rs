//! Tests of the settings and their variables.

use super::variable_names::{KNOWN, PREFIX};
use super::*;
use crate::call::algorithm::Algorithm;

fn read<'a>(variables: &'a [(&'a str, &'a str)]) -> impl Fn(&str) -> Option<String> + 'a {
    |name| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
}

#[test]
fn other_variables_are_named() {
    let said = |names: &[&str]| variable_names::unknown(names.iter().map(|name| format!("{PREFIX}{name}"))).unwrap();
    assert_eq!(said(&["TIMEOUT", "TEST_GPU", "SHRINKS"]), None);
    let expected = format!(
        "these environment variables are ignored, because no setting of this crate has their names: {PREFIX}BUCKETS, {PREFIX}COLOUR"
    );
    assert_eq!(said(&["COLOUR", "TIMEOUT", "BUCKETS"]), Some(expected));
}

#[test]
fn addresses_of_a_running_job_are_separated_by_commas() {
    let addresses = parse_join_addresses("127.0.0.1:80, [::1]:81,").unwrap();
    assert_eq!(addresses, ["127.0.0.1:80".parse().unwrap(), "[::1]:81".parse().unwrap()]);
    for wrong in ["", ",", "127.0.0.1", "127.0.0.1:99999"] {
        let error = parse_join_addresses(wrong).unwrap_err().to_string();
        assert!(error.contains("COLLECTIVES_JOIN"), "{wrong}: {error}");
    }
}

#[test]
fn variables_fill_in_what_was_not_set() {
    let variables = [
        ("COLLECTIVES_TRANSPORT", "tcp"),
        ("COLLECTIVES_TIMEOUT", "1.5"),
        ("COLLECTIVES_LISTEN_ADDRESS", "::1"),
        ("COLLECTIVES_ALGORITHM", "ring:16K-"),
    ];
    let config = Config::default().with_variables(&read(&variables)).unwrap();
    assert_eq!((config.transport, config.timeout), (Transport::Tcp, Duration::from_millis(1500)));
    assert_eq!(config.listen_address, Some("::1".parse().unwrap()));
    let linked = read(&[("COLLECTIVES_LISTEN_ADDRESS", "fe80::1%eth0"), ("COLLECTIVES_SILENCE_TIMEOUT", "90")]);
    let linked = Config::default().with_variables(&linked).unwrap();
    assert_eq!((linked.listen_address, linked.silence_timeout), (Some("fe80::1".parse().unwrap()), Duration::from_secs(90)));
    assert_eq!(Config::default().with_variables(&read(&[])).unwrap().silence_timeout, Duration::from_secs(60));
    assert_eq!(config.algorithms, "ring:16K-".parse().unwrap());
    let algorithms = AlgorithmRanges::new().with(Algorithm::Direct, ..).unwrap();
    let set = Config { transport: Transport::Shm, timeout: Duration::from_secs(3), algorithms, ..Config::default() };
    let config = set.with_variables(&read(&variables)).unwrap();
    assert_eq!((config.transport, config.timeout), (Transport::Shm, Duration::from_secs(3)));
    assert_eq!(config.algorithms.to_string(), "direct:0-");
}

#[test]
fn interfaces_and_ports_come_from_variables_unless_the_program_sets_them() {
    let variables = read(&[("COLLECTIVES_SOCKET_IFNAME", "^docker,lo"), ("COLLECTIVES_PORT_RANGE", "41000:41009")]);
    let config = Config::default().with_variables(&variables).unwrap();
    assert_eq!((config.interfaces, config.port_range), (Some("^docker,lo".parse().unwrap()), Some("41000:41009".parse().unwrap())));
    let own = Config { interfaces: Some("=ib0".parse().unwrap()), port_range: Some("7:9".parse().unwrap()), ..Config::default() };
    let config = own.with_variables(&variables).unwrap();
    assert_eq!((config.interfaces, config.port_range), (Some("=ib0".parse().unwrap()), Some("7:9".parse().unwrap())));
    let connections = |given, variable| {
        let config = Config { connections: given, ..Config::default() };
        config.with_variables(&read(&[("COLLECTIVES_CONNECTIONS", variable)])).map(|config| config.connections)
    };
    assert_eq!([connections(1, "4").unwrap(), connections(2, "4").unwrap(), connections(1, "16").unwrap()], [4, 2, 16]);
    for (given, variable) in [(1, "0"), (1, "17"), (1, "-1"), (1, "many"), (0, "1"), (17, "1")] {
        let error = connections(given, variable).unwrap_err();
        assert!(matches!(error, Error::Config { .. }) && error.to_string().contains("1 to 16"), "{given} {variable}: {error}");
    }
    for (name, wrong) in [("COLLECTIVES_SOCKET_IFNAME", ""), ("COLLECTIVES_SOCKET_IFNAME", "a,^b"), ("COLLECTIVES_PORT_RANGE", "9:8")] {
        let error = Config::default().with_variables(&read(&[(name, wrong)])).unwrap_err();
        assert!(matches!(error, Error::Config { .. }) && error.to_string().starts_with(&format!("{name}={wrong:?}")), "{error}");
    }
}

#[test]
fn metrics_go_to_a_folder_or_an_address() {
    let with = |value| Config::default().with_variables(&read(&[("COLLECTIVES_METRICS", value)]));
    let to = |value| with(value).map(|config| (config.metrics_dir, config.metrics_address)).unwrap();
    assert_eq!(to("/tmp/tcp"), (Some("/tmp/tcp".into()), None));
    assert_eq!(to("tcp://127.0.0.1:9400"), (None, Some("127.0.0.1:9400".parse().unwrap())));
    assert_eq!(to("tcp://[::1]:9400"), (None, Some("[::1]:9400".parse().unwrap())));
    for wrong in ["tcp://", "tcp://:9400", "tcp://127.0.0.1", "tcp://127.0.0.1:0", "tcp://a:9400", "http://127.0.0.1:9400", "file:///tmp"] {
        let error = with(wrong).unwrap_err().to_string();
        assert!(error.contains("COLLECTIVES_METRICS") && error.contains("tcp://IP:PORT"), "{wrong}: {error}");
    }
    let set = Config { metrics_address: Some("127.0.0.1:1".parse().unwrap()), ..Config::default() };
    let config = set.with_variables(&read(&[("COLLECTIVES_METRICS", "tcp://127.0.0.1:2")])).unwrap();
    assert_eq!(config.metrics_address, Some("127.0.0.1:1".parse().unwrap()));
}

#[test]
fn a_secret_comes_from_one_variable_and_is_never_quoted() {
    let with = |variables: &[(&str, &str)]| Config::default().with_variables(&read(variables));
    let long = "0123456789abcdef0123";
    assert_eq!(with(&[("COLLECTIVES_SECRET", long)]).unwrap().secret.unwrap().expose(), long.as_bytes());
    assert!(with(&[]).unwrap().secret.is_none());
    let own = Config { secret: Some(Secret::new(*b"sixteen bytes ok").unwrap()), ..Config::default() };
    let own = own.with_variables(&read(&[("COLLECTIVES_SECRET", long)])).unwrap();
    assert_eq!(own.secret.as_ref().unwrap().expose(), b"sixteen bytes ok");
    assert!(!format!("{own:?}").contains("sixteen"), "{own:?}");
    for variables in [
        &[("COLLECTIVES_SECRET", "hunter2")][..],
        &[("COLLECTIVES_SECRET", "")],
        &[("COLLECTIVES_SECRET", "hunter2 hunter2 hunter2 \u{fffd}")],
        &[("COLLECTIVES_SECRET", "hunter2 hunter2 hunter2"), ("COLLECTIVES_SECRET_FILE", "/none")],
    ] {
        let error = with(variables).unwrap_err().to_string();
        assert!(error.contains("COLLECTIVES_SECRET") && !error.contains("hunter2"), "{error}");
    }
    assert!(matches!(with(&[("COLLECTIVES_SECRET_FILE", "/no/such/file")]), Err(Error::Io { .. })));
}

#[test]
fn whoever_wants_encryption_gets_it_or_an_error_that_says_what_is_missing() {
    let long = ("COLLECTIVES_SECRET", "0123456789abcdef0123");
    let with = |variables: &[(&str, &str)]| Config::default().with_variables(&read(variables));
    let error = with(&[("COLLECTIVES_ENCRYPT", "1")]).unwrap_err().to_string();
    assert!(error.contains("COLLECTIVES_ENCRYPT=1") && error.contains("set COLLECTIVES_SECRET"), "{error}");
    let error = Config { encrypt: true, ..Config::default() }.with_variables(&read(&[])).unwrap_err().to_string();
    assert!(error.contains("Config::encrypt"), "{error}");
    for off in [&[long][..], &[long, ("COLLECTIVES_ENCRYPT", "0")]] {
        assert!(!with(off).unwrap().encrypt && !with(off).unwrap().secret.unwrap().encrypts());
    }
    let on = [with(&[long, ("COLLECTIVES_ENCRYPT", "1")]), Config { encrypt: true, ..Config::default() }.with_variables(&read(&[long]))];
    for on in on {
        if cfg!(feature = "encryption") {
            assert!(on.as_ref().unwrap().encrypt && on.unwrap().secret.unwrap().encrypts());
        } else {
            let error = on.unwrap_err().to_string();
            assert!(error.contains("feature `encryption`") && error.contains("COLLECTIVES_ENCRYPT"), "{error}");
        }
    }
}

#[cfg(feature = "cuda")]
#[test]
fn the_environment_can_have_more_device_calls_compared_and_not_fewer() {
    #[expect(unsafe_code, reason = "nothing is called here")]
    // SAFETY: no communicator is made with it.
    let fewer = Config { check_device_calls: unsafe { CheckDeviceCalls::unchecked_after(0) }, ..Config::default() };
    let kept = fewer.clone().with_variables(&read(&[])).unwrap().check_device_calls;
    assert!(!kept.covers(0) && kept == fewer.check_device_calls);
    for config in [Config::default(), fewer] {
        let strict = config.clone().with_variables(&read(&[("COLLECTIVES_CHECK_DEVICE_CALLS", "1")])).unwrap();
        assert_eq!(strict.check_device_calls, CheckDeviceCalls::ALWAYS);
        assert!(strict.check_device_calls.covers(u64::MAX));
        for less in ["0", "7", "64"] {
            let error = config.clone().with_variables(&read(&[("COLLECTIVES_CHECK_DEVICE_CALLS", less)])).unwrap_err().to_string();
            assert!(error.contains(less) && error.contains("unchecked_after"), "{error}");
        }
    }
}

#[test]
fn a_variable_that_looks_like_one_of_ours_is_refused_and_the_right_one_named() {
    let check = |rest: &str| variable_names::check([format!("{PREFIX}{rest}"), "PATH".to_owned()].into_iter());
    for (slip, meant) in [
        ("TIMOUT", "TIMEOUT"),
        ("TIEMOUT", "TIMEOUT"),
        ("TRANSPORTS", "TRANSPORT"),
        ("TRACE_DIR", "TRACE"),
        ("SECRETFILE", "SECRET_FILE"),
        ("FLIGHT_RECORDER_FOLDER", "FLIGHT_RECORDER"),
    ] {
        let error = check(slip).unwrap_err().to_string();
        assert!(error.starts_with(&format!("{PREFIX}{slip}: not known; did you mean {PREFIX}{meant}?")), "{error}");
    }
    for own in ["TEST_GPU", "LOOM", "SHRINKS", "SOAK_SECONDS", ""] {
        check(own).unwrap();
    }
    KNOWN.iter().for_each(|known| check(known).unwrap());
    variable_names::check(["TIMOUT".to_owned()].into_iter()).unwrap();
}

#[test]
fn every_variable_that_is_read_here_is_known() {
    let source = include_str!("../config.rs");
    let read: std::collections::BTreeSet<&str> = source
        .split(PREFIX)
        .skip(1)
        .map(|text| &text[..text.find(|letter: char| !(letter.is_ascii_uppercase() || letter == '_')).unwrap()])
        .filter(|name| !name.is_empty())
        .collect();
    assert_eq!(read, KNOWN.into_iter().collect());
}

#[test]
fn transports_have_names() {
    for transport in Transport::ALL {
        assert_eq!(transport.to_string().parse::<Transport>().unwrap(), transport);
    }
    let error = "TCP".parse::<Transport>().unwrap_err().to_string();
    assert!(error.contains("\"TCP\"") && error.contains("auto, shm, tcp"), "{error}");
}

#[test]
fn ways_of_waiting_have_names_and_the_program_goes_before_the_environment() {
    for waiting in Waiting::ALL {
        assert_eq!(waiting.to_string().parse::<Waiting>().unwrap(), waiting);
        let variables = [("COLLECTIVES_WAITING", waiting.name())];
        assert_eq!(Config::default().with_variables(&read(&variables)).unwrap().waiting, waiting);
        let set = Config { waiting: Waiting::Spin, ..Config::default() };
        assert_eq!(set.with_variables(&read(&variables)).unwrap().waiting, Waiting::Spin);
    }
    let error = "Sleep".parse::<Waiting>().unwrap_err().to_string();
    assert!(error.contains("\"Sleep\"") && error.contains("auto, spin, sleep"), "{error}");
}

#[test]
fn malformed_variables_are_quoted() {
    for (name, value) in [
        ("COLLECTIVES_TRANSPORT", "rdma"),
        ("COLLECTIVES_WAITING", "yield"),
        ("COLLECTIVES_ALGORITHM", "rung:0-"),
        ("COLLECTIVES_ALGORITHM", ""),
        ("COLLECTIVES_TIMEOUT", "-1"),
        ("COLLECTIVES_TIMEOUT", "soon"),
        ("COLLECTIVES_REPRODUCIBLE", "yes"),
        ("COLLECTIVES_ENCRYPT", "true"),
        ("COLLECTIVES_LISTEN_ADDRESS", "here"),
        ("COLLECTIVES_FLIGHT_RECORDER", "on"),
        ("COLLECTIVES_FLIGHT_RECORDER", "100000000000"),
        ("COLLECTIVES_STALL_WARNING", "never"),
        #[cfg(feature = "cuda")]
        ("COLLECTIVES_CHECK_DEVICE_CALLS", "-2"),
    ] {
        let error = Config::default().with_variables(&read(&[(name, value)])).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains(value), "{error}");
    }
}
