//! Worlds for tests of groups: ranks as threads of this process, and ranks as processes that can be stopped and killed.

#![allow(dead_code, reason = "every test file uses its own part")]

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use bagua_core::error::{Error, Result};
use bagua_core::group::{Bootstrap, Config, Group};

/// No test waits longer for anything.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// A configuration that fails fast.
pub fn config(rank: usize, size: usize) -> Config {
    Config { secret: b"secret".to_vec(), connect_timeout: Duration::from_secs(20), ..Config::new(rank, size) }
}

/// Builds a group of `size` ranks in this process; the results by rank.
pub fn try_world(size: usize, adjust: impl Fn(&mut Config)) -> Vec<Result<Group>> {
    let pending = (0..size).map(|rank| {
        let mut config = config(rank, size);
        adjust(&mut config);
        Bootstrap::bind(config).unwrap()
    });
    let pending: Vec<Bootstrap> = pending.collect();
    let addresses: Vec<Vec<u8>> = pending.iter().map(|pending| pending.address().to_vec()).collect();
    connect_all(pending, &addresses)
}

/// Connects ranks of this process at the same time.
pub fn connect_all(pending: Vec<Bootstrap>, addresses: &[Vec<u8>]) -> Vec<Result<Group>> {
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            pending.into_iter().map(|pending| scope.spawn(move || pending.connect(addresses))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// As [`try_world`], where nothing may go wrong.
pub fn world_with(size: usize, adjust: impl Fn(&mut Config)) -> Vec<Group> {
    try_world(size, adjust).into_iter().map(|group| group.unwrap()).collect()
}

/// A group with the defaults.
pub fn world(size: usize) -> Vec<Group> {
    world_with(size, |_| ())
}

/// Waits until a condition holds.
#[track_caller]
pub fn until(what: &str, mut holds: impl FnMut() -> bool) -> Duration {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < PATIENCE, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
    start.elapsed()
}

/// Waits for a group's first cause.
#[track_caller]
pub fn cause(group: &Group) -> Error {
    until("the group has failed", || group.health().cause().is_some());
    group.health().cause().unwrap()
}

/// The TCP port in an address.
pub fn port(address: &[u8]) -> u16 {
    let text = String::from_utf8_lossy(address);
    let rest = text.split_once("127.0.0.1:").expect("listens on loopback").1;
    rest.chars().take_while(char::is_ascii_digit).collect::<String>().parse().unwrap()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len() / 2).map(|at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap()).collect()
}

/// This test binary, to be started once more: in the emulator that cargo runs it in, where that is so.
fn this_program() -> Command {
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
    said: BufReader<std::process::ChildStdout>,
}

impl Process {
    /// Starts the test binary again, as rank `rank`. `entry` is the name of a test that calls [`live`].
    pub fn start(entry: &str, rank: usize, size: usize, heartbeat: Duration) -> Process {
        let mut child = this_program()
            .args([entry, "--exact", "--ignored", "--nocapture"])
            .env("GROUP_TEST_RANK", rank.to_string())
            .env("GROUP_TEST_SIZE", size.to_string())
            .env("GROUP_TEST_HEARTBEAT_MS", heartbeat.as_millis().to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let said = BufReader::new(child.stdout.take().unwrap());
        Process { child, said }
    }

    /// Waits for a line with this word, and returns what follows it.
    pub fn hear(&mut self, word: &str) -> String {
        loop {
            let mut line = String::new();
            assert!(self.said.read_line(&mut line).unwrap() > 0, "the process ended before it said {word:?}");
            if let Some((_, rest)) = line.split_once(word) {
                return rest.trim().to_owned();
            }
        }
    }

    /// Its address.
    pub fn address(&mut self) -> Vec<u8> {
        unhex(&self.hear("ADDRESS "))
    }

    /// Gives it a line.
    pub fn tell(&mut self, line: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    /// Tells it all addresses, so that it connects.
    pub fn connect(&mut self, addresses: &[Vec<u8>]) {
        let all: Vec<String> = addresses.iter().map(|address| hex(address)).collect();
        self.tell(&all.join(" "));
    }

    /// Sends a signal.
    pub fn signal(&self, signal: rustix::process::Signal) {
        let id = rustix::process::Pid::from_raw(i32::try_from(self.child.id()).unwrap()).unwrap();
        rustix::process::kill_process(id, signal).unwrap();
    }

    /// Its exit code.
    pub fn end(mut self) -> Option<i32> {
        drop(self.child.stdin.take());
        self.child.wait().unwrap().code()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What a [`Process`] does: binds, tells its address, hears all, connects, and then obeys until its input ends.
pub fn live() {
    let group = join();
    for line in std::io::stdin().lines().map(|line| line.unwrap()) {
        match line.as_str() {
            "cause" => println!("\nCAUSE {}", cause(&group)),
            "raise" => group.raise("ValueError", "bad number"),
            "fork" => {
                fork(|| std::thread::sleep(Duration::from_secs(10)));
                println!("\nFORKED");
            }
            other => panic!("told {other:?}"),
        }
    }
}

/// The first half of what a [`Process`] does: its group, connected.
pub fn join() -> Group {
    let number = |name: &str| std::env::var(name).unwrap().parse::<usize>().unwrap();
    let mut config = config(number("GROUP_TEST_RANK"), number("GROUP_TEST_SIZE"));
    config.heartbeat_timeout = Duration::from_millis(number("GROUP_TEST_HEARTBEAT_MS") as u64);
    let pending = Bootstrap::bind(config).unwrap();
    println!("\nADDRESS {}", hex(pending.address()));
    let line = std::io::stdin().lines().next().unwrap().unwrap();
    let addresses: Vec<Vec<u8>> = line.split(' ').map(unhex).collect();
    let group = pending.connect(&addresses).unwrap();
    println!("\nCONNECTED");
    group
}

/// A world in which the ranks of `processes` are processes and the others are threads of this one, all at `heartbeat`.
pub fn mixed(entry: &str, size: usize, processes: &[usize], heartbeat: Duration) -> (Vec<Group>, Vec<Process>) {
    let mut others: Vec<Process> = processes.iter().map(|rank| Process::start(entry, *rank, size, heartbeat)).collect();
    let own = (0..size)
        .filter(|rank| !processes.contains(rank))
        .map(|rank| Bootstrap::bind(Config { heartbeat_timeout: heartbeat, ..config(rank, size) }).unwrap());
    let own: Vec<Bootstrap> = own.collect();
    let mut known = own.iter().map(|pending| pending.address().to_vec()).collect::<Vec<_>>().into_iter();
    let mut told = others.iter_mut().map(Process::address).collect::<Vec<_>>().into_iter();
    let addresses: Vec<Vec<u8>> = (0..size)
        .map(|rank| if processes.contains(&rank) { told.next().unwrap() } else { known.next().unwrap() })
        .collect();
    others.iter_mut().for_each(|process| process.connect(&addresses));
    let groups = connect_all(own, &addresses).into_iter().map(|group| group.unwrap()).collect();
    others.iter_mut().for_each(|process| _ = process.hear("CONNECTED"));
    (groups, others)
}

/// Runs something in a forked child, which then exits with code 0. Returns its process id.
pub fn fork(inside: impl FnOnce()) -> i32 {
    // SAFETY: the child runs `inside`, which takes no lock that another thread may have held (the allocator has its own
    // handlers), and ends without running anything of its parent's.
    match unsafe { libc::fork() } {
        0 => {
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(inside));
            // SAFETY: ends the process, as it must.
            unsafe { libc::_exit(i32::from(outcome.is_err())) }
        }
        child => {
            assert!(child > 0, "fork: {}", std::io::Error::last_os_error());
            child
        }
    }
}

/// Waits for a child of [`fork`]: its exit code.
pub fn exit_code(child: i32) -> i32 {
    let mut status = 0;
    // SAFETY: waits for an own child, with a place for its status.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert!(libc::WIFEXITED(status), "the child was killed: {status:x}");
    libc::WEXITSTATUS(status)
}
