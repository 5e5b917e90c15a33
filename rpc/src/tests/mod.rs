//! Endpoints of one process that talk over real connections.

mod autograd;
mod calls;
mod coming_from_torch;
mod fencing;
mod hostile;
mod leases;
mod rendezvous;
mod soak;
mod tls;
mod waiting;

use std::panic::resume_unwind;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use tokio::net::TcpListener;
use tokio::runtime::{Builder, Handle, Runtime};

use super::{Call, Driver, Endpoint, Methods, Pending, RRef, Registry, RemoteError, RemoteObject, Settings, Values};

/// A short lease, for tests in which one ends.
const LEASE: Duration = Duration::from_secs(2);
const TIMEOUT: Duration = Duration::from_secs(10);

/// A few processes of one job.
struct Job {
    lease: Duration,
    runtime: Runtime,
    stoppable: Vec<Runtime>,
    drivers: Vec<Driver>,
    endpoints: Vec<Endpoint>,
}

impl Job {
    /// Returns a job whose leases do not end, however busy the machine is.
    fn new() -> Self {
        Self::with_lease(Duration::from_secs(3600))
    }

    fn with_lease(lease: Duration) -> Self {
        let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime");
        Self { lease, runtime, stoppable: Vec::new(), drivers: Vec::new(), endpoints: Vec::new() }
    }

    fn settings(&self, name: &str) -> Settings {
        Settings { lease: self.lease, ..Settings::new(name, "test") }
    }

    /// A process that others can connect to, and its address.
    fn server(&mut self, name: &str) -> (Endpoint, String) {
        let endpoint = self.start(self.settings(name));
        let address = self.serve(&endpoint);
        (endpoint, address)
    }

    fn serve(&self, endpoint: &Endpoint) -> String {
        let listener = self.runtime.block_on(TcpListener::bind("127.0.0.1:0")).expect("a free port");
        let address = listener.local_addr().expect("it is bound").to_string();
        endpoint.serve(listener);
        address
    }

    /// A process that connects to others.
    fn client(&mut self, name: &str, servers: &[(&str, &str)]) -> Endpoint {
        let driver = Driver::start().expect("a thread");
        let endpoint = Endpoint::start_driven(self.settings(name), registry(), &driver);
        self.endpoints.push(endpoint.clone());
        self.drivers.push(driver);
        for (server, address) in servers {
            endpoint.connect(server, address, TIMEOUT).expect("the server is up");
        }
        endpoint
    }

    /// A process that [`stop`] can stop: all its connections share one thread.
    fn stoppable_client(&mut self, server: &str, address: &str) -> (Endpoint, Handle) {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
        let thread = runtime.handle().clone();
        self.stoppable.push(runtime);
        let endpoint = self.start_on(self.settings("trainer-0"), thread.clone());
        endpoint.connect(server, address, TIMEOUT).expect("the server is up");
        (endpoint, thread)
    }

    fn start(&mut self, settings: Settings) -> Endpoint {
        self.start_on(settings, self.runtime.handle().clone())
    }

    fn start_on(&mut self, settings: Settings, runtime: Handle) -> Endpoint {
        let endpoint = Endpoint::start(settings, registry(), runtime);
        self.endpoints.push(endpoint.clone());
        endpoint
    }
}

/// Stops the only thread of a runtime until the returned sender is dropped: its process neither sends nor reads, as
/// after a SIGSTOP.
fn stop(thread: &Handle) -> mpsc::Sender<()> {
    let (resume, resumed) = mpsc::channel::<()>();
    let (report, stopped) = mpsc::channel();
    thread.spawn(async move {
        report.send(()).expect("it is awaited");
        resumed.recv().expect_err("the sender is dropped, and sends nothing");
    });
    stopped.recv().expect("the runtime is up");
    resume
}

impl Drop for Job {
    fn drop(&mut self) {
        for endpoint in &self.endpoints {
            endpoint.shutdown();
        }
    }
}

/// One server and one client.
fn pair() -> (Job, Endpoint, Endpoint) {
    let mut job = Job::new();
    let (server, address) = job.server("ps-0");
    let client = job.client("trainer-0", &[("ps-0", &address)]);
    (job, server, client)
}

/// Waits for something that happens on other threads.
fn eventually(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + 3 * TIMEOUT;
    while !condition() {
        assert!(Instant::now() < deadline, "never: {what}");
        // Leaves the cores to what it waits for.
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn registry() -> Registry {
    let mut registry = Registry::default();
    registry.object("counter", |_, (start,): (i64,)| Ok(Counter { sum: start, kept: None }));
    registry.function("echo", |_, values: Values| Ok(values));
    registry.function("whose", |_, (reference,): (RRef,)| Ok(reference.owner().to_owned()));
    autograd::offer(&mut registry);
    coming_from_torch::offer(&mut registry);
    crate::rendezvous::offer(&mut registry);
    registry
}

struct Counter {
    sum: i64,
    kept: Option<RRef>,
}

impl Counter {
    fn add(&mut self, n: i64) -> i64 {
        self.sum += n;
        self.sum
    }

    /// Calls another object while this call is being waited for.
    fn ask(&mut self, other: &RRef, n: i64) -> Result<i64, RemoteError> {
        let pending: Pending<i64> = other.rpc_async("add", n)?;
        pending.wait()
    }
}

impl RemoteObject for Counter {
    fn methods(methods: &mut Methods<Self>) {
        methods
            .add("add", |counter, _, n: i64| Ok(counter.add(n)))
            .add_quick("add_quickly", |counter, _, n: i64| Ok(counter.add(n)))
            .add_quick("ask_quickly", |counter, _, (other, n): (RRef, i64)| counter.ask(&other, n))
            // Without the panic hook: for its backtrace it reads the symbols of the whole program, while the connection that runs
            // quick methods answers no ping, and is closed on a slow machine.
            .add_quick("panic_quickly", |_, _, ()| -> Result<(), _> {
                resume_unwind(Box::new("index 3 is out of range"))
            })
            .add("ask", |counter, _, (other, n): (RRef, i64)| counter.ask(&other, n))
            .add("keep", |counter, _, other: Option<RRef>| {
                counter.kept = other;
                Ok(())
            })
            .add("kept", |counter, _, ()| Ok(counter.kept.clone()))
            .add("fail", |_, _, ()| Err::<(), _>(RemoteError::new("the disk is full")))
            .add("panic", |_, _, ()| -> Result<(), _> { panic!("index 3 is out of range") })
            .add("caller", |_, call: &Call, ()| Ok(call.caller.to_string()))
            .add("sleep", |_, _, ms: i64| {
                std::thread::sleep(Duration::from_millis(ms.unsigned_abs()));
                Ok(())
            });
    }
}
