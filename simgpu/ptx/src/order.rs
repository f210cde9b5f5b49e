//! The order that an access or a fence asks for, as its suffixes state it.

/// How far an acquire or a release reaches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Scope {
    /// The threads of the block (`.cta`).
    Block,
    /// The threads of the device (`.cluster`, `.gpu`, `.gl`).
    Device,
    /// All threads, those of the host and of other devices included (`.sys`).
    System,
}

/// The order of one instruction. Plain (`.weak`) and `.relaxed` accesses neither acquire nor release.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Order {
    pub(crate) acquires: bool,
    pub(crate) releases: bool,
    /// Whether it is `.volatile`.
    pub(crate) volatile: bool,
    pub(crate) scope: Scope,
}

impl Order {
    /// Returns the order of a load, a store or an atomic operation.
    pub(crate) fn of_access(suffixes: &[&str]) -> Self {
        let mut order = Self { acquires: false, releases: false, volatile: false, scope: Scope::Device };
        suffixes.iter().for_each(|suffix| order.read(suffix));
        order
    }

    /// Returns the order of `fence` or `membar`. A fence between proxies orders nothing unless it says so.
    pub(crate) fn of_fence(opcode: &str, suffixes: &[&str]) -> Self {
        let mut order = Self::of_access(suffixes);
        let says = order.acquires || order.releases;
        let other = opcode == "fence" && suffixes.iter().any(|suffix| suffix.starts_with("proxy"));
        if !says && !other {
            (order.acquires, order.releases) = (true, true);
        }
        order
    }

    fn read(&mut self, suffix: &str) {
        match suffix {
            "acquire" => self.acquires = true,
            "release" => self.releases = true,
            "acq_rel" | "sc" => (self.acquires, self.releases) = (true, true),
            "volatile" => (self.volatile, self.scope) = (true, Scope::System),
            "cta" => self.scope = Scope::Block,
            "cluster" | "gpu" | "gl" => self.scope = Scope::Device,
            "sys" => self.scope = Scope::System,
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(acquires: bool, releases: bool, scope: Scope) -> Order {
        Order { acquires, releases, volatile: false, scope }
    }

    #[test]
    fn suffixes_state_the_order_of_accesses() {
        assert_eq!(Order::of_access(&["global", "u32"]), order(false, false, Scope::Device));
        assert_eq!(Order::of_access(&["relaxed", "sys", "global", "u32"]), order(false, false, Scope::System));
        assert_eq!(Order::of_access(&["acquire", "cta", "u32"]), order(true, false, Scope::Block));
        assert_eq!(Order::of_access(&["release", "gpu", "u32"]), order(false, true, Scope::Device));
        assert_eq!(Order::of_access(&["acq_rel", "sys", "add", "u32"]), order(true, true, Scope::System));
        assert!(Order::of_access(&["volatile", "global", "u32"]).volatile);
    }

    #[test]
    fn suffixes_state_the_order_of_fences() {
        let both = |scope| order(true, true, scope);
        assert_eq!(Order::of_fence("membar", &["gl"]), both(Scope::Device));
        assert_eq!(Order::of_fence("membar", &["sys"]), both(Scope::System));
        assert_eq!(Order::of_fence("membar", &["cta"]), both(Scope::Block));
        assert_eq!(Order::of_fence("fence", &["sc", "cluster"]), both(Scope::Device));
        assert_eq!(Order::of_fence("fence", &["cta"]), both(Scope::Block));
        assert_eq!(Order::of_fence("fence", &["acquire", "sys"]), order(true, false, Scope::System));
        assert_eq!(Order::of_fence("fence", &["proxy", "async"]), order(false, false, Scope::Device));
        assert_eq!(Order::of_fence("fence", &["proxy", "tensormap::generic", "release", "gpu"]), order(false, true, Scope::Device));
    }
}
