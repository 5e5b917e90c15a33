//! Which process of which job this is: given by the environment inside a job, by flags when a role
//! is started by hand. Pure, apart from what the caller passes in.

use psjobs_api::env::{self, EnvironmentError};
use psjobs_api::{DEFAULT_PORT, Environment, Role, Training};

/// Name of a job whose roles are started by hand, and its id by default.
const BY_HAND: &str = "manual";

/// Starts a role by hand, one terminal each. The operator and `psjobs run` set all of this.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Place in the job")]
pub struct IdentityArgs {
    /// Servers plus trainers [default: the servers and one trainer]
    #[arg(long, value_name = "N", env = env::WORLD_SIZE)]
    pub world_size: Option<u32>,
    /// Rank of this process: the servers come first, then the trainers [default: the first of its role, if that is clear]
    #[arg(long, value_name = "RANK", env = env::RANK)]
    pub rank: Option<u32>,
    /// Number of servers [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024), conflicts_with = "server_addrs")]
    pub servers: Option<u32>,
    /// Host of server 0 [default: localhost]
    #[arg(long, value_name = "HOST", env = env::MASTER_ADDR)]
    pub master_addr: Option<String>,
    /// Port of server 0; further servers have the next ones [default: 29500]
    #[arg(long, value_name = "PORT", env = env::MASTER_PORT, value_parser = clap::value_parser!(u16).range(1..))]
    pub master_port: Option<u16>,
    /// Addresses of all servers in order, where they are on several machines
    #[arg(long, value_name = "HOST:PORT", value_delimiter = ',')]
    pub server_addrs: Vec<String>,
    /// Let trainers come and go, and train while so many are there: an elastic job; --world-size then counts the most.
    /// Servers and trainers need it
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub min_trainers: Option<u32>,
    /// Connections of this trainer to each server, where one core for a connection is the limit [default: 1; with TLS half
    /// of the cores, at most 4]
    #[arg(long, value_name = "N", env = env::PSJOB_CONNECTIONS)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=i64::from(env::MOST_CONNECTIONS)))]
    pub connections: Option<u32>,
    /// Id of the job, the same for all of its processes, which answer no others. Without TLS it is all that keeps strangers
    /// out, so choose one that cannot be guessed [default: manual]
    #[arg(long, value_name = "ID", env = env::PSJOB_UID, hide_env_values = true)]
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub job_id: Option<String>,
    /// Folder with ca.crt, tls.crt and tls.key, as `psjobs certificates DIR` writes it (DIR/ps for servers, DIR/trainer for
    /// trainers): talk TLS, and only to those who show a certificate of that authority
    #[arg(long, value_name = "DIR", env = env::PSJOB_TLS_DIR)]
    pub tls_dir: Option<String>,
}

/// Flags or variables that do not make a place in a job.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PlaceError {
    #[error(transparent)]
    Environment(#[from] EnvironmentError),
    #[error("this process is a {found} of job {job} ({} says so); start it with `{}`", env::PSJOB_ROLE, command(*.found))]
    OtherRole { job: String, found: Role },
    #[error("{flag} is {value}, but the environment of job {job} says {want}; leave {flag} out")]
    Contradiction { flag: &'static str, value: String, job: String, want: String },
    #[error(
        "--world-size {world_size} leaves no trainer beside {servers} servers; it counts both, so give at least {}",
        .servers + 1
    )]
    NoTrainer { world_size: u32, servers: u32 },
    #[error(
        "--min-trainers {min} is more than the {trainers} trainers of the job; lower it, or raise --world-size to {}",
        .min + .servers
    )]
    TooFewTrainers { min: u32, trainers: u32, servers: u32 },
    #[error("--rank {rank} is outside the job; with --world-size {world_size} the ranks are 0 to {}", .world_size - 1)]
    OutsideJob { rank: u32, world_size: u32 },
    #[error("rank {rank} is a {is} (ranks below {servers} are servers); start it with `{}`", command(*.is))]
    RankOfOtherRole { rank: u32, is: Role, servers: u32 },
    #[error("which one of several is this? give --rank; for a {role} it is {first} to {last}")]
    RankNeeded { role: Role, first: u32, last: u32 },
    #[error("server {index} would be on port {port}, past 65535; lower --master-port or give --server-addrs")]
    PortTooHigh { index: u32, port: u32 },
    #[error("{value:?} in --server-addrs is no address; write host:port for every server, separated by commas")]
    Address { value: String },
}

fn command(role: Role) -> &'static str {
    match role {
        Role::Server => "psjobs-worker serve",
        Role::Trainer => "psjobs-worker train",
    }
}

impl IdentityArgs {
    /// The place of a process that was started as a `role`. `lookup` reads an environment variable.
    ///
    /// # Errors
    /// If variables or flags are missing, contradict each other, or name another role.
    pub fn resolve(&self, role: Role, lookup: impl Fn(&str) -> Option<String>) -> Result<Environment, PlaceError> {
        match Environment::from_vars(lookup)? {
            Some(environment) => self.agree(role, environment),
            None => self.by_hand(role),
        }
    }

    /// Inside a job the environment has given everything; flags may only repeat it.
    fn agree(&self, role: Role, environment: Environment) -> Result<Environment, PlaceError> {
        let job = &environment.name;
        if environment.role != role {
            return Err(PlaceError::OtherRole { job: job.clone(), found: environment.role });
        }
        let (host, port) = split(&environment.servers[0]);
        let text = |value: Option<u32>| value.map(|value| value.to_string());
        let given = |addrs: &[String]| (!addrs.is_empty()).then(|| addrs.join(","));
        for (flag, value, want) in [
            ("--world-size", text(self.world_size), environment.world_size().to_string()),
            ("--rank", text(self.rank), environment.rank().to_string()),
            (
                "--min-trainers",
                text(self.min_trainers),
                text(environment.min_trainers).unwrap_or_else(|| "nothing of it".into()),
            ),
            (
                "--connections",
                text(self.connections),
                text(environment.connections).unwrap_or_else(|| "nothing of it".into()),
            ),
            ("--job-id", self.job_id.clone(), environment.uid.clone()),
            ("--servers", text(self.servers), environment.servers.len().to_string()),
            ("--master-addr", self.master_addr.clone(), host.to_owned()),
            ("--master-port", text(self.master_port.map(u32::from)), port.to_owned()),
            ("--server-addrs", given(&self.server_addrs), environment.servers.join(",")),
        ] {
            if let Some(value) = value.filter(|value| *value != want) {
                return Err(PlaceError::Contradiction { flag, value, job: job.clone(), want });
            }
        }
        Ok(environment)
    }

    fn by_hand(&self, role: Role) -> Result<Environment, PlaceError> {
        let addresses = self.addresses()?;
        let servers = addresses.len() as u32;
        let world_size = self.world_size.unwrap_or(servers + 1);
        if world_size <= servers {
            return Err(PlaceError::NoTrainer { world_size, servers });
        }
        let (first, last) = match role {
            Role::Server => (0, servers - 1),
            Role::Trainer => (servers, world_size - 1),
        };
        let rank = match self.rank {
            Some(rank) => rank,
            None if first == last => first,
            None => return Err(PlaceError::RankNeeded { role, first, last }),
        };
        let (is, index) =
            Environment::place(rank, servers, world_size).ok_or(PlaceError::OutsideJob { rank, world_size })?;
        if is != role {
            return Err(PlaceError::RankOfOtherRole { rank, is, servers });
        }
        let trainers = world_size - servers;
        if let Some(min) = self.min_trainers.filter(|min| *min > trainers) {
            return Err(PlaceError::TooFewTrainers { min, trainers, servers });
        }
        let id = self.job_id.as_deref().unwrap_or(BY_HAND);
        let job = Environment::new(BY_HAND, id, addresses, trainers, Training::default());
        let tls_folder = self.tls_dir.clone();
        let (min_trainers, connections) = (self.min_trainers, self.connections);
        Ok(Environment { role, index, local_rank: index, min_trainers, connections, tls_folder, ..job })
    }

    fn addresses(&self) -> Result<Vec<String>, PlaceError> {
        if !self.server_addrs.is_empty() {
            let checked = self.server_addrs.iter().map(|address| {
                let usable = |(host, port): (&str, &str)| !host.is_empty() && port.parse::<u16>().is_ok_and(|p| p > 0);
                let ok = address.rsplit_once(':').is_some_and(usable);
                ok.then(|| address.clone()).ok_or_else(|| PlaceError::Address { value: address.clone() })
            });
            return checked.collect();
        }
        let host = self.master_addr.as_deref().unwrap_or("localhost");
        // An IPv6 address needs brackets before a port can follow it.
        let host = if host.contains(':') && !host.starts_with('[') { format!("[{host}]") } else { host.to_owned() };
        let first = u32::from(self.master_port.unwrap_or(DEFAULT_PORT));
        let address = |index| match first + index {
            port if port > u32::from(u16::MAX) => Err(PlaceError::PortTooHigh { index, port }),
            port => Ok(format!("{host}:{port}")),
        };
        (0..self.servers.unwrap_or(1)).map(address).collect()
    }
}

/// Host and port of an address whose form was checked before.
pub fn split(address: &str) -> (&str, &str) {
    address.rsplit_once(':').unwrap_or((address, ""))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn flags() -> IdentityArgs {
        IdentityArgs::default()
    }

    fn by_hand(args: &IdentityArgs, role: Role) -> Result<Environment, PlaceError> {
        args.resolve(role, |_| None)
    }

    #[test]
    fn without_flags_there_is_one_server_and_one_trainer() {
        let server = by_hand(&flags(), Role::Server).expect("defaults");
        let trainer = by_hand(&flags(), Role::Trainer).expect("defaults");
        assert_eq!((server.rank(), trainer.rank(), trainer.world_size()), (0, 1, 2));
        assert_eq!(trainer.servers, ["localhost:29500"]);
        assert_eq!(server.uid, trainer.uid);
    }

    #[test]
    fn the_id_of_a_job_can_be_chosen() {
        let args = IdentityArgs { job_id: Some("8f3a".into()), ..flags() };
        assert_eq!(by_hand(&args, Role::Server).expect("fits").uid, "8f3a");
        assert_eq!(by_hand(&flags(), Role::Server).expect("fits").uid, BY_HAND);
    }

    #[test]
    fn ranks_ports_and_addresses_follow_from_the_flags() {
        let args = IdentityArgs { world_size: Some(5), servers: Some(2), rank: Some(3), ..flags() };
        let args = IdentityArgs { master_addr: Some("::1".into()), master_port: Some(4000), ..args };
        let trainer = by_hand(&args, Role::Trainer).expect("fits");
        assert_eq!((trainer.index, trainer.trainers, trainer.local_rank), (1, 3, 1));
        assert_eq!(trainer.servers, ["[::1]:4000", "[::1]:4001"]);

        let args = IdentityArgs { server_addrs: vec!["a:1".into(), "b:2".into()], rank: Some(1), ..flags() };
        let server = by_hand(&args, Role::Server).expect("fits");
        assert_eq!((server.index, server.servers.as_slice()), (1, ["a:1".to_owned(), "b:2".to_owned()].as_slice()));
    }

    #[test]
    fn flags_that_make_no_place_are_refused_with_the_numbers() {
        let rows = [
            (Role::Trainer, IdentityArgs { world_size: Some(1), ..flags() }, "at least 2"),
            (Role::Trainer, IdentityArgs { world_size: Some(3), rank: Some(3), ..flags() }, "0 to 2"),
            (Role::Trainer, IdentityArgs { world_size: Some(3), rank: Some(0), ..flags() }, "psjobs-worker serve"),
            (Role::Server, IdentityArgs { world_size: Some(3), rank: Some(1), ..flags() }, "psjobs-worker train"),
            (Role::Trainer, IdentityArgs { world_size: Some(4), servers: Some(2), ..flags() }, "2 to 3"),
            (Role::Server, IdentityArgs { servers: Some(3), ..flags() }, "0 to 2"),
            (Role::Server, IdentityArgs { servers: Some(2), master_port: Some(65535), ..flags() }, "65536"),
            (Role::Server, IdentityArgs { world_size: Some(3), min_trainers: Some(4), ..flags() }, "--world-size to 5"),
            (Role::Trainer, IdentityArgs { server_addrs: vec!["nohost".into()], ..flags() }, "host:port"),
            (Role::Trainer, IdentityArgs { server_addrs: vec!["a:0".into()], ..flags() }, "host:port"),
        ];
        for (role, args, want) in rows {
            let error = by_hand(&args, role).expect_err(want).to_string();
            assert!(error.contains(want), "{want}: {error}");
        }
    }

    #[test]
    fn inside_a_job_the_environment_decides() {
        let environment = Environment {
            name: "mnist".into(),
            role: Role::Trainer,
            index: 1,
            trainers: 2,
            servers: vec!["mnist-ps-0.mnist.default.svc:29500".into()],
            ..by_hand(&flags(), Role::Trainer).expect("defaults")
        };
        let vars: BTreeMap<_, _> = environment.to_vars().into_iter().collect();
        let resolve = |args: IdentityArgs, role| args.resolve(role, |name| vars.get(name).cloned());

        assert_eq!(resolve(flags(), Role::Trainer), Ok(environment));
        let repeated = IdentityArgs { rank: Some(2), world_size: Some(3), master_port: Some(29500), ..flags() };
        assert!(resolve(repeated, Role::Trainer).is_ok(), "flags may repeat the environment");
        let error =
            resolve(IdentityArgs { rank: Some(1), ..flags() }, Role::Trainer).expect_err("another rank").to_string();
        assert!(error.contains("--rank is 1") && error.contains("says 2"), "{error}");
        let error = resolve(IdentityArgs { min_trainers: Some(1), ..flags() }, Role::Trainer).expect_err("not elastic");
        assert!(error.to_string().contains("--min-trainers is 1"), "{error}");
        let error = resolve(flags(), Role::Server).expect_err("another role").to_string();
        assert!(error.contains("psjobs-worker train"), "{error}");
    }
}
