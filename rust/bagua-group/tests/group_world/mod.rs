//! Worlds for tests of groups. Ranks are threads of this process, or processes that can be stopped and killed.

#![allow(dead_code, reason = "every program of tests uses other functions")]

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use bagua_group::{Bootstrap, Config, Group, TransportChoice};
use bagua_kernels::error::{Error, Result};

/// Maximum time that a test waits for one event.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Far below the heartbeat timeout of the tests that use it, so an event within this time was not found by silence.
/// `benchmarks/` measures how fast it is.
pub const AT_ONCE: Duration = Duration::from_secs(20);

/// Heartbeat timeout for tests in which no rank may be found by silence.
pub const NEVER_SILENT: Duration = Duration::from_secs(60);

/// Returns a configuration with short timeouts.
pub fn config(rank: usize, size: usize) -> Config {
    Config { secret: b"secret".to_vec(), connect_timeout: Duration::from_secs(20), ..Config::new(rank, size) }
}

/// Builds a group of `size` ranks in this process. Returns the results by rank.
pub fn try_world(size: usize, adjust: impl Fn(&mut Config)) -> Vec<Result<Group>> {
    let bootstraps = (0..size).map(|rank| {
        let mut config = config(rank, size);
        adjust(&mut config);
        Bootstrap::bind(config).unwrap()
    });
    let bootstraps: Vec<Bootstrap> = bootstraps.collect();
    let addresses: Vec<Vec<u8>> = bootstraps.iter().map(|bootstrap| bootstrap.address().to_vec()).collect();
    connect_all(bootstraps, &addresses)
}

/// Connects ranks of this process at the same time.
pub fn connect_all(bootstraps: Vec<Bootstrap>, addresses: &[Vec<u8>]) -> Vec<Result<Group>> {
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            bootstraps.into_iter().map(|bootstrap| scope.spawn(move || bootstrap.connect(addresses))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Like [`try_world`], but every rank must succeed.
pub fn world_with(size: usize, adjust: impl Fn(&mut Config)) -> Vec<Group> {
    try_world(size, adjust).into_iter().map(|group| group.unwrap()).collect()
}

/// Builds a group of `size` ranks with the default configuration.
pub fn world(size: usize) -> Vec<Group> {
    world_with(size, |_| ())
}

/// Waits until a condition holds.
#[track_caller]
pub fn until(what: &str, mut holds: impl FnMut() -> bool) -> Duration {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
    start.elapsed()
}

/// Waits for a group's first failure.
#[track_caller]
pub fn cause(group: &Group) -> Error {
    until("the group has failed", || group.health().cause().is_some());
    group.health().cause().unwrap()
}

/// Returns a loopback address that only this process uses. A free port there is not taken by another test, nor by an
/// outgoing connection, whose local address is 127.0.0.1.
pub fn own_host() -> String {
    let [.., high, middle, low] = std::process::id().to_be_bytes();
    format!("127.{}.{middle}.{low}", 64 | high)
}

/// Returns the TCP port in an address: behind the IP address, with 7 bits in each byte.
pub fn port(address: &[u8]) -> u16 {
    let ip = address.windows(4).position(|bytes| bytes == [127, 0, 0, 1]).expect("listens on loopback");
    let rest = &address[ip + 4..];
    let last = rest.iter().position(|byte| byte & 0x80 == 0).expect("a port");
    rest[..=last].iter().rev().fold(0, |port, byte| port << 7 | u16::from(byte & 0x7f))
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub fn unhex(text: &str) -> Vec<u8> {
    (0..text.len() / 2).map(|at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap()).collect()
}

/// Returns the command that starts this test binary, in the emulator if cargo runs it in one.
#[expect(clippy::disallowed_methods, reason = "tests for another architecture run in an emulator")]
pub fn this_program() -> Command {
    let program = std::env::current_exe().unwrap();
    match std::env::var("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER") {
        Ok(runner) if cfg!(target_arch = "aarch64") => {
            let mut words = runner.split_whitespace();
            let mut command = Command::new(words.next().expect("a runner has a name"));
            command.args(words).arg(program);
            command
        }
        _ => Command::new(program),
    }
}

/// A rank in a process of its own. Killed when dropped.
pub struct Process {
    child: Child,
    output: BufReader<std::process::ChildStdout>,
}

impl Process {
    /// Starts this program again, as rank `rank`. `entry` is the path of an ignored test that calls [`run_commands`].
    pub fn start(entry: &str, rank: usize, size: usize, heartbeat: Duration) -> Process {
        Process::start_over(TransportChoice::Auto, entry, rank, size, heartbeat)
    }

    /// Like [`Process::start`], over this transport.
    fn start_over(transport: TransportChoice, entry: &str, rank: usize, size: usize, heartbeat: Duration) -> Process {
        let mut child = this_program()
            .args([entry, "--exact", "--ignored", "--nocapture"])
            .env("GROUP_TEST_RANK", rank.to_string())
            .env("GROUP_TEST_SIZE", size.to_string())
            .env("GROUP_TEST_HEARTBEAT_MS", heartbeat.as_millis().to_string())
            .env("GROUP_TEST_TRANSPORT", transport.name())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Process { child, output }
    }

    /// Waits for an output line with this word, and returns the text after it.
    pub fn read_after(&mut self, word: &str) -> String {
        loop {
            let mut line = String::new();
            assert!(self.output.read_line(&mut line).unwrap() > 0, "the process ended before it printed {word:?}");
            if let Some((_, rest)) = line.split_once(word) {
                return rest.trim().to_owned();
            }
        }
    }

    /// Returns the address of the process's rank.
    pub fn address(&mut self) -> Vec<u8> {
        unhex(&self.read_after("ADDRESS "))
    }

    /// Writes a line to the input of the process.
    pub fn write(&mut self, line: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    /// Sends the process all addresses. It then connects.
    pub fn connect(&mut self, addresses: &[Vec<u8>]) {
        let all: Vec<String> = addresses.iter().map(|address| hex(address)).collect();
        self.write(&all.join(" "));
    }

    /// Sends a signal.
    pub fn signal(&self, signal: rustix::process::Signal) {
        let id = rustix::process::Pid::from_raw(i32::try_from(self.child.id()).unwrap()).unwrap();
        rustix::process::kill_process(id, signal).unwrap();
    }

    /// Returns the number of sockets that the process has open.
    pub fn sockets(&self) -> usize {
        sockets(self.child.id())
    }

    /// Waits for the end of the process. Returns the signal that caused it.
    pub fn killed_by(mut self) -> Option<i32> {
        // Waiting would close the input, and so end the process.
        let _input = self.child.stdin.take();
        std::os::unix::process::ExitStatusExt::signal(&self.child.wait().unwrap())
    }

    /// Closes the input of the process. Returns its exit code.
    pub fn end(mut self) -> Option<i32> {
        drop(self.child.stdin.take());
        self.child.wait().unwrap().code()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Fails if the process has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The main function of a [`Process`]: joins the group and then runs the commands of its input.
pub fn run_commands() {
    let group = join();
    for line in std::io::stdin().lines().map(|line| line.unwrap()) {
        match line.as_str() {
            "cause" => println!("\nCAUSE {}", cause(&group)),
            "raise" => group.raise("ValueError", "bad number"),
            "fork" => {
                fork(|| std::thread::sleep(Duration::from_secs(10)));
                println!("\nFORKED");
            }
            other => panic!("unknown command {other:?}"),
        }
    }
}

/// Joins the group of a [`Process`]: binds, prints its address, reads all addresses, and connects.
#[expect(clippy::disallowed_methods, reason = "the test that started this process says its rank so")]
pub fn join() -> Group {
    let number = |name: &str| std::env::var(name).unwrap().parse::<usize>().unwrap();
    let mut config = config(number("GROUP_TEST_RANK"), number("GROUP_TEST_SIZE"));
    config.heartbeat_timeout = Duration::from_millis(number("GROUP_TEST_HEARTBEAT_MS") as u64);
    config.transport = TransportChoice::by_name("transport", &std::env::var("GROUP_TEST_TRANSPORT").unwrap()).unwrap();
    let bootstrap = Bootstrap::bind(config).unwrap();
    println!("\nADDRESS {}", hex(bootstrap.address()));
    let line = std::io::stdin().lines().next().unwrap().unwrap();
    let addresses: Vec<Vec<u8>> = line.split(' ').map(unhex).collect();
    let group = bootstrap.connect(&addresses).unwrap();
    println!("\nCONNECTED");
    group
}

/// Builds a world in which the ranks of `processes` are processes and the others are threads of this process.
pub fn mixed(entry: &str, size: usize, processes: &[usize], heartbeat: Duration) -> (Vec<Group>, Vec<Process>) {
    mixed_over(TransportChoice::Auto, entry, size, processes, heartbeat)
}

/// Like [`mixed`], over this transport.
pub fn mixed_over(
    transport: TransportChoice,
    entry: &str,
    size: usize,
    processes: &[usize],
    heartbeat: Duration,
) -> (Vec<Group>, Vec<Process>) {
    let start = |rank: &usize| Process::start_over(transport, entry, *rank, size, heartbeat);
    let mut others: Vec<Process> = processes.iter().map(start).collect();
    let own = (0..size)
        .filter(|rank| !processes.contains(rank))
        .map(|rank| Bootstrap::bind(Config { heartbeat_timeout: heartbeat, transport, ..config(rank, size) }).unwrap());
    let own: Vec<Bootstrap> = own.collect();
    let mut of_threads = own.iter().map(|bootstrap| bootstrap.address().to_vec()).collect::<Vec<_>>().into_iter();
    let mut of_processes = others.iter_mut().map(Process::address).collect::<Vec<_>>().into_iter();
    let addresses: Vec<Vec<u8>> = (0..size)
        .map(|rank| if processes.contains(&rank) { of_processes.next().unwrap() } else { of_threads.next().unwrap() })
        .collect();
    others.iter_mut().for_each(|process| process.connect(&addresses));
    let groups = connect_all(own, &addresses).into_iter().map(|group| group.unwrap()).collect();
    others.iter_mut().for_each(|process| _ = process.read_after("CONNECTED"));
    (groups, others)
}

/// Runs a function in a forked child, which then exits with 0 unless the function panics. Returns the child's process
/// id.
pub fn fork(in_child: impl FnOnce()) -> i32 {
    // SAFETY: the child runs `in_child`, which takes no lock that another thread may have held (the allocator has its
    // own handlers), and ends without running exit handlers of its parent.
    match unsafe { libc::fork() } {
        0 => {
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(in_child));
            // SAFETY: ends the process at once.
            unsafe { libc::_exit(i32::from(outcome.is_err())) }
        }
        child => {
            assert!(child > 0, "fork: {}", std::io::Error::last_os_error());
            child
        }
    }
}

/// Waits for a child of [`fork`] and returns its exit code.
pub fn exit_code(child: i32) -> i32 {
    let mut status = 0;
    // SAFETY: waits for a child of this process, with a valid pointer for its status.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert!(libc::WIFEXITED(status), "the child was killed: {status:x}");
    libc::WEXITSTATUS(status)
}

/// Returns the number of sockets that a process has open.
pub fn sockets(process: u32) -> usize {
    let open = std::fs::read_dir(format!("/proc/{process}/fd")).unwrap();
    let targets = open.filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok());
    targets.filter(|target| target.to_string_lossy().starts_with("socket:")).count()
}
