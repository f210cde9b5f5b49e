//! The variables of NCCL and of the CUDA driver that this crate has to know too.

/// The values of these variables.
pub(crate) struct DeviceEnvironment {
    /// `NCCL_MULTI_RANK_GPU_ENABLE`: several ranks may be on one device.
    pub(crate) multi_rank_gpu: bool,
    /// `NCCL_HOSTID`: the identity by which NCCL decides which ranks share a host.
    pub(crate) host_id: Option<String>,
    /// `CUDA_LAUNCH_BLOCKING`: the driver waits for each kernel before it returns.
    pub(crate) launches_block: bool,
    /// Whether `NCCL_SOCKET_IFNAME` chooses the network interface.
    pub(crate) chooses_interface: bool,
    /// A variable and its value that override how dependent communicators are made (`device/comm/`).
    pub(crate) overrides: Option<String>,
}

impl DeviceEnvironment {
    /// Takes the variables from `read`.
    pub(super) fn of(read: &dyn Fn(&str) -> Option<String>) -> Self {
        let multi_rank_gpu = read("NCCL_MULTI_RANK_GPU_ENABLE").is_some_and(|value| value.trim() == "1");
        let launches_block = read("CUDA_LAUNCH_BLOCKING").is_some_and(|value| value.trim() == "1");
        let overrides = overrides(read);
        let chooses_interface = read("NCCL_SOCKET_IFNAME").is_some_and(|value| !value.is_empty());
        Self { multi_rank_gpu, host_id: read("NCCL_HOSTID"), launches_block, chooses_interface, overrides }
    }
}

/// Returns the first variable, with its value, that changes how dependent communicators are made. NCCL reads more texts
/// as numbers than Rust does (`off` as 0, `0x1` as 1), so every text counts except the one that changes nothing.
fn overrides(read: &dyn Fn(&str) -> Option<String>) -> Option<String> {
    // Each variable with the value that every communicator is configured with anyway.
    let meant =
        [("NCCL_COMM_BLOCKING", "-2147483648"), ("NCCL_COMM_SPLIT_SHARE_RESOURCES", "1"), ("NCCL_COMM_SHRINK_SHARE_RESOURCES", "0")];
    meant.into_iter().find_map(|(name, meant)| {
        let value = read(name).filter(|value| !value.is_empty() && value != meant)?;
        Some(format!("{name}={value}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read<'a>(variables: &'a [(&str, &str)]) -> impl Fn(&str) -> Option<String> + 'a {
        move |name| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
    }

    #[test]
    fn variables_count_only_if_they_are_set_to_something() {
        let set = [("CUDA_LAUNCH_BLOCKING", "1"), ("NCCL_SOCKET_IFNAME", "=eth0"), ("NCCL_MULTI_RANK_GPU_ENABLE", "1 ")];
        let all = DeviceEnvironment::of(&read(&set));
        assert!(all.launches_block && all.chooses_interface && all.multi_rank_gpu);
        let unset = [("CUDA_LAUNCH_BLOCKING", "0"), ("NCCL_SOCKET_IFNAME", ""), ("NCCL_MULTI_RANK_GPU_ENABLE", "")];
        for variables in [&unset[..], &[]] {
            let none = DeviceEnvironment::of(&read(variables));
            assert!(!none.launches_block && !none.chooses_interface && !none.multi_rank_gpu);
        }
    }

    #[test]
    fn what_nccl_may_read_as_another_number_is_an_override() {
        for (name, meant) in
            [("NCCL_COMM_BLOCKING", "-2147483648"), ("NCCL_COMM_SPLIT_SHARE_RESOURCES", "1"), ("NCCL_COMM_SHRINK_SHARE_RESOURCES", "0")]
        {
            assert_eq!(overrides(&read(&[(name, meant)])), None);
            assert_eq!(overrides(&read(&[(name, "")])), None);
            for value in ["false", "off", "0x0", "0x1", "2", "-1", " 1", "1 # x", "-2"] {
                assert_eq!(overrides(&read(&[(name, value)])), Some(format!("{name}={value}")));
            }
        }
        assert_eq!(overrides(&read(&[("NCCL_COMM_SPLIT_SHARE_RESOURCES", "0")])), Some("NCCL_COMM_SPLIT_SHARE_RESOURCES=0".to_owned()));
        assert_eq!(overrides(&read(&[])), None);
    }
}
