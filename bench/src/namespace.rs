//! A second machine on this one: a network namespace with a link to it. It vanishes as a machine does that loses its power
//! or its network: what is sent to it is lost, and nothing says so.

use std::net::Ipv4Addr;
use std::process::{Command, Output, Stdio};

use anyhow::{Context as _, ensure};

/// A network namespace with a link to this one; both go when it is dropped.
#[derive(Debug)]
pub struct OtherMachine {
    namespace: String,
    /// The link's end here.
    device: String,
    /// Addresses of the ends, here and there.
    ends: [Ipv4Addr; 2],
}

/// The name of the link's end in the namespace.
const INSIDE: &str = "psjobs0";
/// The addresses from here on are reserved for benchmarks (RFC 2544): 2 to the power of 17.
const RESERVED: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 0);
/// Each link takes four of them.
const NETWORKS: u32 = 1 << 15;
/// Most machines of one process.
pub const MACHINES: u32 = 8;

impl OtherMachine {
    /// Makes one.
    ///
    /// # Errors
    /// Mostly for lack of rights.
    pub fn make() -> anyhow::Result<Self> {
        Self::make_number(0)
    }

    /// Makes one of several, of which each has a number below [`MACHINES`] and a link of its own.
    ///
    /// # Errors
    /// Mostly for lack of rights.
    pub fn make_number(number: u32) -> anyhow::Result<Self> {
        let process = std::process::id();
        // The kernel's names of devices have 15 letters at most, and a process id seven digits.
        let suffix = if number == 0 { String::new() } else { format!("n{}", number % MACHINES) };
        let (namespace, device) = (format!("psjobs-{process}-other{suffix}"), format!("psjobs{process}{suffix}"));
        let network = process.wrapping_add(number % MACHINES * (NETWORKS / MACHINES));
        let machine = Self { namespace, device, ends: ends(network) };
        machine.set_up().context(
            "another machine cannot be played by a network namespace, which takes root and the program ip (iproute2)",
        )?;
        Ok(machine)
    }

    fn set_up(&self) -> anyhow::Result<()> {
        let Self { namespace, device, ends } = self;
        let hardware = ends.map(hardware_address);
        let networks = ends.map(|address| format!("{address}/30"));
        run("ip", &["netns", "add", namespace])?;
        let here = ["link", "add", "name", device, "address", &hardware[0]];
        let there = ["type", "veth", "peer", "name", INSIDE, "address", &hardware[1], "netns", namespace];
        run("ip", &[&here[..], &there].concat())?;
        run("ip", &["addr", "add", &networks[0], "dev", device])?;
        run("ip", &["link", "set", device, "up"])?;
        run("ip", &["-n", namespace, "addr", "add", &networks[1], "dev", INSIDE])?;
        run("ip", &["-n", namespace, "link", "set", "lo", "up"])?;
        run("ip", &["-n", namespace, "link", "set", INSIDE, "up"])?;
        // Without it this machine would notice after seconds that no neighbour answers, and refuse connections: between
        // pods there are routers, and none of them reports it.
        let neighbour = ends[1].to_string();
        let fixed = ["lladdr", &hardware[1], "nud", "permanent", "dev", device];
        run("ip", &[&["neigh", "replace", &neighbour], &fixed[..]].concat())?;
        Ok(())
    }

    /// Returns the address of this machine on the link.
    #[must_use]
    pub fn here(&self) -> Ipv4Addr {
        self.ends[0]
    }

    /// Returns the address of the other machine.
    #[must_use]
    pub fn there(&self) -> Ipv4Addr {
        self.ends[1]
    }

    /// Returns the words in front of a command that make it run there.
    #[must_use]
    pub fn enter(&self) -> [&str; 4] {
        ["ip", "netns", "exec", &self.namespace]
    }

    /// Limits the rate of the link, in bits a second each way.
    ///
    /// # Errors
    /// If the program tc is missing, or the kernel has no token bucket filter.
    pub fn limit(&self, bits_per_second: u64) -> anyhow::Result<()> {
        let rate = format!("{bits_per_second}bit");
        let limit = |device: &str| -> Vec<String> {
            ["qdisc", "add", "dev", device, "root", "tbf", "rate", &rate, "burst", "4mb", "latency", "20ms"]
                .map(str::to_owned)
                .into()
        };
        for arguments in [limit(&self.device), [vec!["-n".into(), self.namespace.clone()], limit(INSIDE)].concat()] {
            let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
            run("tc", &arguments)
                .context("the rate of a link cannot be limited, which takes the program tc (iproute2)")?;
        }
        Ok(())
    }

    /// Loses all packets from now on, both ways.
    ///
    /// # Errors
    /// If the link is gone.
    pub fn vanish(&self) -> anyhow::Result<()> {
        // The end there: with the one here the routes would go, and connections would fail at once.
        run("ip", &["-n", &self.namespace, "link", "set", INSIDE, "down"])?;
        Ok(())
    }
}

impl Drop for OtherMachine {
    fn drop(&mut self) {
        // A part that could not be made need not go. The link goes first: with its namespace it would go at some later time.
        let _ = run("ip", &["link", "del", &self.device]);
        let _ = run("ip", &["netns", "del", &self.namespace]);
    }
}

/// Returns the addresses of the two ends of the link of this number.
fn ends(number: u32) -> [Ipv4Addr; 2] {
    let network = u32::from(RESERVED) + 4 * (number % NETWORKS);
    [network + 1, network + 2].map(Ipv4Addr::from)
}

/// Returns a hardware address that no manufacturer gives, another one for each address.
fn hardware_address(address: Ipv4Addr) -> String {
    let [a, b, c, d] = address.octets();
    format!("02:00:{a:02x}:{b:02x}:{c:02x}:{d:02x}")
}

/// Runs a program to its end; what it wrote, or what it said was wrong.
pub fn run(program: &str, args: &[&str]) -> anyhow::Result<String> {
    let output = Command::new(program).args(args).stdin(Stdio::null()).output();
    let Output { status, stdout, stderr } = output.with_context(|| format!("cannot start {program}"))?;
    let said = String::from_utf8_lossy(&stderr);
    ensure!(status.success(), "{program} {}: {}", args.join(" "), said.trim());
    Ok(String::from_utf8_lossy(&stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_have_links_of_their_own_within_what_is_reserved() {
        for (process, here, there) in [
            (0, [198, 18, 0, 1], [198, 18, 0, 2]),
            (65, [198, 18, 1, 5], [198, 18, 1, 6]),
            (NETWORKS - 1, [198, 19, 255, 253], [198, 19, 255, 254]),
            (NETWORKS, [198, 18, 0, 1], [198, 18, 0, 2]),
        ] {
            assert_eq!(ends(process), [here, there].map(Ipv4Addr::from), "process {process}");
        }
        assert_eq!(hardware_address(Ipv4Addr::new(198, 18, 1, 5)), "02:00:c6:12:01:05");
    }
}
