//! Tests with variables as real launchers set them.

use super::*;
use crate::error::Error;

const PARENT: u32 = 4711;

/// Detects the launcher from lines of `NAME=value`, as `env` prints them.
fn run(recording: &str) -> Result<Launch> {
    detect(&reader(recording), PARENT)
}

fn reader(recording: &str) -> impl Fn(&str) -> Option<String> + use<> {
    let pairs: Vec<(String, String)> =
        recording.lines().filter_map(|line| line.trim().split_once('=')).map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
    move |name| pairs.iter().rfind(|(other, _)| other == name).map(|(_, value)| value.clone())
}

fn wrong(recording: &str) -> String {
    let error = run(recording).unwrap_err();
    assert!(matches!(error, Error::Config { .. }), "{error:?}");
    error.to_string()
}

const TORCHRUN: &str = "
    TORCHELASTIC_RUN_ID=none
    LOCAL_RANK=1
    RANK=3
    GROUP_RANK=1
    ROLE_RANK=3
    ROLE_NAME=default
    LOCAL_WORLD_SIZE=2
    WORLD_SIZE=4
    GROUP_WORLD_SIZE=2
    ROLE_WORLD_SIZE=4
    MASTER_ADDR=node1
    MASTER_PORT=41231
    TORCHELASTIC_RESTART_COUNT=0
    TORCHELASTIC_MAX_RESTARTS=3
    TORCH_NCCL_ASYNC_ERROR_HANDLING=1
    OMP_NUM_THREADS=1";

const SLURM_TWO_NODES: &str = "
    SLURM_JOB_ID=812345
    SLURM_JOBID=812345
    SLURM_JOB_NODELIST=node[07-08]
    SLURM_NODELIST=node[07-08]
    SLURM_JOB_NUM_NODES=2
    SLURM_NNODES=2
    SLURM_NTASKS=4
    SLURM_NPROCS=4
    SLURM_TASKS_PER_NODE=2(x2)
    SLURM_STEP_ID=0
    SLURM_STEPID=0
    SLURM_STEP_NODELIST=node[07-08]
    SLURM_STEP_NUM_NODES=2
    SLURM_STEP_NUM_TASKS=4
    SLURM_STEP_TASKS_PER_NODE=2(x2)
    SLURM_SRUN_COMM_HOST=10.1.0.2
    SLURM_LAUNCH_NODE_IPADDR=10.1.0.2
    SLURM_PROCID=3
    SLURM_LOCALID=1
    SLURM_NODEID=1
    SLURM_GTIDS=2,3";

const OPEN_MPI_4: &str = "
    OMPI_COMM_WORLD_RANK=2
    OMPI_COMM_WORLD_SIZE=4
    OMPI_COMM_WORLD_LOCAL_RANK=2
    OMPI_COMM_WORLD_LOCAL_SIZE=4
    OMPI_COMM_WORLD_NODE_RANK=2
    OMPI_UNIVERSE_SIZE=4
    OMPI_MCA_orte_hnp_uri=3478519808.0;tcp://172.17.0.2,10.0.0.4:44923
    OMPI_MCA_ess_base_jobid=3478519809
    OMPI_MCA_ess_base_vpid=2
    OMPI_APP_CTX_NUM_PROCS=4
    PMIX_NAMESPACE=3478519809
    PMIX_RANK=2
    PMIX_SERVER_URI21=3478519808.0;tcp4://127.0.0.1:39211
    PMIX_SERVER_URI3=3478519808.0;tcp4://127.0.0.1:39211";

const OPEN_MPI_5: &str = "
    OMPI_COMM_WORLD_RANK=1
    OMPI_COMM_WORLD_SIZE=2
    OMPI_COMM_WORLD_LOCAL_RANK=1
    OMPI_COMM_WORLD_LOCAL_SIZE=2
    OMPI_COMM_WORLD_NODE_RANK=1
    PRTE_LAUNCHED=1
    PMIX_NAMESPACE=prterun-box-90210@1
    PMIX_RANK=1
    PMIX_SERVER_URI41=prterun-box-90210@0.0;tcp4://127.0.0.1:50817
    PMIX_SERVER_URI4=prterun-box-90210@0.0;tcp4://127.0.0.1:50817";

const MPICH: &str = "
    PMI_RANK=0
    PMI_FD=6
    PMI_SIZE=3
    MPI_LOCALNRANKS=3
    MPI_LOCALRANKID=0
    GFORTRAN_UNBUFFERED_PRECONNECTED=y
    HYDI_CONTROL_FD=8";

const INTEL_MPI: &str = "
    I_MPI_ROOT=/opt/intel/oneapi/mpi/2021.11
    I_MPI_MPIRUN=mpirun
    I_MPI_HYDRA_BOOTSTRAP=ssh
    PMI_RANK=5
    PMI_FD=14
    PMI_SIZE=8
    MPI_LOCALNRANKS=4
    MPI_LOCALRANKID=1
    MASTER_ADDR=cn001";

const KUBERNETES_JOB: &str = "
    KUBERNETES_SERVICE_HOST=10.96.0.1
    KUBERNETES_PORT=tcp://10.96.0.1:443
    JOB_COMPLETION_INDEX=1
    HOSTNAME=train-1
    WORLD_SIZE=3
    MASTER_ADDR=train-0.train.default.svc.cluster.local";

#[test]
fn torchrun_serves_the_store_or_leaves_it_to_rank_0() {
    let launch = run(TORCHRUN).unwrap();
    let expected = Launch {
        rank: 3,
        world_size: 4,
        local_rank: Some(1),
        local_world_size: Some(2),
        several_hosts: Some(true),
        address: "node1".to_owned(),
        port: 41231,
        agent_store: false,
        prefix: "collectives/attempt_0".to_owned(),
        launcher: "torchrun",
    };
    assert_eq!(launch, expected);
    let agent = format!("{TORCHRUN}\nTORCHELASTIC_USE_AGENT_STORE=True\nTORCHELASTIC_RESTART_COUNT=2");
    let expected = Launch { agent_store: true, prefix: "collectives/attempt_2".to_owned(), ..expected };
    assert_eq!(run(&agent).unwrap(), expected);
    assert!(!run(&format!("{TORCHRUN}\nTORCHELASTIC_USE_AGENT_STORE=False")).unwrap().agent_store);
    assert!(serves_store(&reader(&agent), "node1", 41231));
    assert!(!serves_store(&reader(&agent), "node2", 41231) && !serves_store(&reader(&agent), "node1", 41232));
    assert!(wrong(&format!("{TORCHRUN}\nTORCHELASTIC_RESTART_COUNT=many")).contains("\"many\""));
}

#[test]
fn plain_variables_need_little() {
    let launch = run("RANK=0\nWORLD_SIZE=1").unwrap();
    assert_eq!((launch.address.as_str(), launch.port, launch.prefix.as_str()), ("127.0.0.1", 29500, "collectives"));
    let launch = run("RANK=1\nWORLD_SIZE=2\nLOCAL_WORLD_SIZE=2\nLOCAL_RANK=1").unwrap();
    assert_eq!(launch.address, "127.0.0.1");
    assert_eq!(run("RANK=1\nWORLD_SIZE=2\nMASTER_ADDR=[fe80::1%eth0]").unwrap().address, "fe80::1%eth0");
    // An empty variable counts as not set.
    assert_eq!(run("RANK=0\nWORLD_SIZE=1\nMASTER_ADDR=\nMASTER_PORT=\nLOCAL_RANK=").unwrap().local_rank, None);
}

#[test]
fn slurm_names_the_first_host() {
    let launch = run(SLURM_TWO_NODES).unwrap();
    assert_eq!((launch.rank, launch.world_size, launch.local_rank, launch.local_world_size), (3, 4, Some(1), Some(2)));
    assert_eq!((launch.address.as_str(), launch.launcher), ("node07", "Slurm"));
    assert!((20_000..=32_000).contains(&launch.port));
    let first = run(&format!("{SLURM_TWO_NODES}\nSLURM_PROCID=0\nSLURM_LOCALID=0\nSLURM_NODEID=0")).unwrap();
    assert_eq!((first.address, first.port), (launch.address, launch.port));
    assert_ne!(run(&format!("{SLURM_TWO_NODES}\nSLURM_STEP_ID=1")).unwrap().port, launch.port);
    let uneven = run(&format!("{SLURM_TWO_NODES}\nSLURM_STEP_TASKS_PER_NODE=3,1\nSLURM_LOCALID=0")).unwrap();
    assert_eq!(uneven.local_world_size, Some(1));
    let alone = run(&format!("{SLURM_TWO_NODES}\nSLURM_STEP_NODELIST=node07\nSLURM_STEP_TASKS_PER_NODE=4\nSLURM_NODEID=0")).unwrap();
    assert_eq!(alone.address, "127.0.0.1");
    let told = run(&format!("{SLURM_TWO_NODES}\nMASTER_ADDR=10.0.0.9\nMASTER_PORT=1234")).unwrap();
    assert_eq!((told.address.as_str(), told.port), ("10.0.0.9", 1234));
}

#[test]
fn what_slurm_says_wrongly_is_quoted() {
    assert!(wrong(&format!("{SLURM_TWO_NODES}\nSLURM_STEP_NODELIST=node[1-")).contains("node[1-"));
    assert!(wrong(&format!("{SLURM_TWO_NODES}\nSLURM_STEP_TASKS_PER_NODE=2(y2)")).contains("2(y2)"));
    assert!(wrong(&format!("{SLURM_TWO_NODES}\nSLURM_LOCALID=-1")).contains("\"-1\""));
    // The batch script itself, not started by srun.
    let batch = "SLURM_JOB_ID=1\nSLURM_PROCID=0\nSLURM_LOCALID=0\nSLURM_NTASKS=4\nSLURM_NODELIST=node[1-2]";
    assert!(wrong(batch).contains("srun"));
    assert_eq!(run("SLURM_JOB_ID=1\nSLURM_PROCID=0\nSLURM_NTASKS=1").unwrap().address, "127.0.0.1");
}

#[test]
fn open_mpi_4_and_5_on_one_host() {
    for (recording, rank, size) in [(OPEN_MPI_4, 2, 4), (OPEN_MPI_5, 1, 2)] {
        let launch = run(recording).unwrap();
        assert_eq!((launch.rank, launch.world_size, launch.local_rank, launch.local_world_size), (rank, size, Some(rank), Some(size)));
        assert_eq!((launch.address.as_str(), launch.launcher), ("127.0.0.1", "Open MPI"));
        assert!((20_000..=32_000).contains(&launch.port));
        // The port depends on the job's name, so a wrapper script between launcher and program does no harm.
        assert_eq!(detect(&reader(recording), 1).unwrap().port, launch.port);
        // Two jobs at the same time.
        assert_ne!(run(&format!("{recording}\nPMIX_NAMESPACE=prterun-box-90211@1")).unwrap().port, launch.port);
    }
}

#[test]
fn mpi_on_several_hosts_needs_an_address() {
    let several = format!("{OPEN_MPI_4}\nOMPI_COMM_WORLD_LOCAL_SIZE=2\nOMPI_COMM_WORLD_LOCAL_RANK=0");
    let text = wrong(&several);
    assert!(text.starts_with("MASTER_ADDR") && text.contains("OMPI_COMM_WORLD_SIZE=\"4\""), "{text}");
    assert_eq!(run(&format!("{several}\nMASTER_ADDR=head")).unwrap().address, "head");
    let launch = run(INTEL_MPI).unwrap();
    assert_eq!((launch.rank, launch.world_size, launch.local_rank, launch.local_world_size), (5, 8, Some(1), Some(4)));
    // The job has no name that all hosts know, so the port is the default.
    assert_eq!((launch.address.as_str(), launch.port), ("cn001", 29500));
}

#[test]
fn hydra_on_one_host_makes_its_port_of_the_parent() {
    let launch = run(MPICH).unwrap();
    assert_eq!((launch.rank, launch.world_size, launch.local_rank, launch.launcher), (0, 3, Some(0), "Hydra"));
    assert_eq!(launch.address, "127.0.0.1");
    let other = run(&format!("{MPICH}\nPMI_RANK=2\nMPI_LOCALRANKID=2")).unwrap();
    assert_eq!(other.port, launch.port);
    assert_ne!(detect(&reader(MPICH), PARENT + 1).unwrap().port, launch.port);
    assert_eq!(run(&format!("{MPICH}\nMASTER_PORT=3000")).unwrap().port, 3000);
}

#[test]
fn the_innermost_launcher_is_believed() {
    // mpirun inside an allocation, whose batch script Slurm calls rank 0 of 4.
    let batch = "SLURM_JOB_ID=1\nSLURM_PROCID=0\nSLURM_NTASKS=4\nSLURM_STEP_ID=0\nSLURM_NODELIST=n1\n";
    assert_eq!(run(&format!("{batch}{MPICH}")).unwrap().launcher, "Hydra");
    assert_eq!(run(&format!("{batch}{OPEN_MPI_5}")).unwrap().launcher, "Open MPI");
    assert_eq!(run(&format!("{SLURM_TWO_NODES}{TORCHRUN}")).unwrap().launcher, "torchrun");
    // srun with its own PMI.
    assert_eq!(run(&format!("{SLURM_TWO_NODES}\nPMI_RANK=3\nPMI_SIZE=4\nPMI_FD=3")).unwrap().launcher, "Slurm");
    assert_eq!(run("PMI_RANK=0\nPMI_SIZE=1").unwrap().launcher, "PMI");
}

#[test]
fn a_kubernetes_job_is_indexed() {
    let launch = run(KUBERNETES_JOB).unwrap();
    assert_eq!((launch.rank, launch.world_size, launch.port, launch.launcher), (1, 3, 29500, "Kubernetes"));
    assert_eq!(launch.address, "train-0.train.default.svc.cluster.local");
    assert!(wrong("JOB_COMPLETION_INDEX=0\nMASTER_ADDR=a").starts_with("WORLD_SIZE"));
}

#[test]
fn what_is_missing_or_malformed_is_named_and_what_was_found_is_listed() {
    let cases = [
        ("", "RANK", "none of the variables"),
        ("RANK=1", "WORLD_SIZE", "RANK=\"1\""),
        ("WORLD_SIZE=2\nMASTER_ADDR=h", "RANK", "MASTER_ADDR=\"h\""),
        ("RANK=1\nWORLD_SIZE=2", "MASTER_ADDR", "WORLD_SIZE=\"2\""),
        ("RANK=one\nWORLD_SIZE=2\nMASTER_ADDR=h", "RANK", "\"one\""),
        ("RANK=-1\nWORLD_SIZE=2\nMASTER_ADDR=h", "RANK", "\"-1\""),
        ("RANK=1\nWORLD_SIZE=2\nMASTER_ADDR=h\nMASTER_PORT=70000", "MASTER_PORT", "\"70000\""),
        ("RANK=0\nWORLD_SIZE=2\nMASTER_ADDR=[]", "RANK and WORLD_SIZE", "\"\" is not a valid host"),
        ("RANK=0\nWORLD_SIZE=2\nMASTER_ADDR=node 1", "RANK and WORLD_SIZE", "\"node 1\" is not a valid host"),
        ("RANK=0\nWORLD_SIZE=0", "MASTER_ADDR", "WORLD_SIZE=\"0\""),
        ("RANK=0\nWORLD_SIZE=0\nMASTER_ADDR=h", "RANK and WORLD_SIZE", "world size 0"),
        ("RANK=0\nWORLD_SIZE=2\nMASTER_ADDR=h\nLOCAL_RANK=2\nLOCAL_WORLD_SIZE=2", "RANK and WORLD_SIZE", "local rank 2"),
        ("RANK=0\nWORLD_SIZE=2\nMASTER_ADDR=h\nLOCAL_WORLD_SIZE=3", "RANK and WORLD_SIZE", "local world size 3"),
        ("RANK=0\nWORLD_SIZE=2\nMASTER_ADDR=h\nLOCAL_RANK=2", "RANK and WORLD_SIZE", "local rank 2"),
        ("RANK=0\nWORLD_SIZE=2\nMASTER_ADDR=h\nGROUP_WORLD_SIZE=two", "GROUP_WORLD_SIZE", "\"two\""),
        ("OMPI_COMM_WORLD_RANK=0", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
        ("PMI_SIZE=4", "PMI_RANK", "PMI_SIZE=\"4\""),
        ("SLURM_PROCID=0", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ];
    for (recording, name, quoted) in cases {
        let text = wrong(recording);
        assert!(text.starts_with(name) && text.contains(quoted), "{recording:?}: {text}");
    }
}

#[test]
fn several_hosts_are_known_by_any_word_of_the_launcher() {
    let hosts = |recording: &str| run(recording).unwrap().hosts();
    assert_eq!([hosts(TORCHRUN), hosts(SLURM_TWO_NODES)], [Hosts::Several; 2]);
    assert_eq!(hosts(&SLURM_TWO_NODES.replace("SLURM_STEP_TASKS_PER_NODE=2(x2)", "")), Hosts::Several);
    assert_eq!([hosts(OPEN_MPI_4), hosts(MPICH), hosts("RANK=0\nWORLD_SIZE=1")], [Hosts::One; 3]);
    assert_eq!(hosts(INTEL_MPI), Hosts::Several);
    assert_eq!([hosts(KUBERNETES_JOB), hosts("RANK=1\nWORLD_SIZE=2\nMASTER_ADDR=h")], [Hosts::Unknown; 2]);
    assert_eq!(hosts("RANK=1\nWORLD_SIZE=2\nMASTER_ADDR=h\nGROUP_WORLD_SIZE=2"), Hosts::Several);
    assert_eq!(hosts("RANK=1\nWORLD_SIZE=2\nMASTER_ADDR=h\nGROUP_WORLD_SIZE=1"), Hosts::One);
}

#[test]
fn made_ports_stay_in_their_range_and_spread() {
    let ports: std::collections::HashSet<u16> = (0..1000).map(|job| port_of(&job.to_string())).collect();
    assert!(ports.iter().all(|port| (20_000..=32_000).contains(port)));
    assert!(ports.len() > 940, "{} of 1000", ports.len());
    assert_eq!(port_of(""), 20_000 + (0xcbf2_9ce4_8422_2325_u64 % 12_001) as u16);
}

#[test]
fn the_first_host_is_written_out() {
    let cases = [
        ("node1", "node1", true),
        ("node[01-03,7]", "node01", false),
        ("node[007]", "node007", true),
        ("gpu-a,gpu-b", "gpu-a", false),
        ("rack[2-3]n[10,12]-ib.local,x", "rack2n10-ib.local", false),
        ("n[1]m[2]", "n1m2", true),
        ("tux[0-99999999999999999999]", "tux0", false),
        ("[5-6]", "5", false),
    ];
    for (list, host, only) in cases {
        assert_eq!(first_host(list), Ok((host.to_owned(), only)), "{list}");
    }
}

#[test]
fn a_malformed_list_is_refused() {
    for list in ["", ",", "node[", "node[1-3", "node]", "node[]", "node[-3]", "node[a-b]", "node[1-3]]", "no de", "[[1]]"] {
        assert!(first_host(list).is_err(), "{list:?} gave {:?}", first_host(list));
    }
}
