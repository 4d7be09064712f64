//! `--levels`: every level of the kernels, by element type, on two cores.
//!
//! Two threads, each on its own core, rewrite one tensor each. Then each thread combines its half of both tensors into
//! both, as two ranks do in an arena. In each round every level and type runs once, in random order. The table shows
//! fastest and median times as multiples of those of float32 on the level in use. The host of a virtual machine may
//! move the two cores together and apart, so rounds in which two threads meet much faster than in the rest have a table
//! of their own.

use std::cell::UnsafeCell;
use std::hint::spin_loop;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::thread;
use std::time::{Duration, Instant};

use bagua_core::platform::{Processors, processors, set_processors};
use bagua_core::reduce::{combine, combine_everywhere_on, level, levels};
use bagua_core::types::{DType, ReduceOp};

use crate::KIB;

const SIZES: [usize; 4] = [256 * KIB, 1024 * KIB, 4096 * KIB, 16_384 * KIB];
const DTYPES: [DType; 4] = [DType::F32, DType::F16, DType::BF16, DType::I32];
/// Bytes that fill the two tensors: numbers near one or a hundredth in every type.
const FILLING: [u8; 2] = [0x3c, 0x3d];
/// Measuring time of each size.
const BUDGET: Duration = Duration::from_secs(10);
/// Number of meetings that are timed together, and number of such timings.
const MEETINGS: (u32, u32) = (20, 10);

/// Number of looks at the other thread's counter before this thread yields its core.
const LOOKS: u32 = 1 << 20;

/// Memory of both threads.
struct SharedTensors {
    passed: [Counter; 2],
    tensors: [UnsafeCell<Vec<u8>>; 2],
}

#[repr(align(128))]
struct Counter(AtomicU32);

// SAFETY: both threads touch only the parts of a tensor that `Thread::rewrite` and `Thread::combine` name, and meet
// between the two calls.
unsafe impl Sync for SharedTensors {}

/// One of the two threads.
struct Thread<'a> {
    shared: &'a SharedTensors,
    index: usize,
    /// Meetings so far.
    passed: u32,
}

impl Thread<'_> {
    fn meet(&mut self) {
        self.passed += 1;
        self.shared.passed[self.index].0.store(self.passed, Release);
        let mut looks = 0;
        while self.shared.passed[1 - self.index].0.load(Acquire) < self.passed {
            spin_loop();
            looks += 1;
            // The other thread may be waiting for a core that another program has.
            if looks % LOOKS == 0 {
                thread::yield_now();
            }
        }
    }

    /// Seconds per meeting.
    fn distance(&mut self) -> f64 {
        let (meetings, times) = MEETINGS;
        let once = |_| {
            let begun = Instant::now();
            (0..meetings).for_each(|_| self.meet());
            begun.elapsed().as_secs_f64() / f64::from(meetings)
        };
        (0..times).map(once).fold(f64::INFINITY, f64::min)
    }

    fn rewrite(&mut self) {
        // SAFETY: each thread rewrites its own tensor, between two meetings.
        unsafe { &mut *self.shared.tensors[self.index].get() }.fill(FILLING[self.index]);
    }

    fn combine(&mut self, level: &str, dtype: DType) {
        let halves = self.shared.tensors.each_ref().map(|tensor| {
            // SAFETY: the vectors themselves do not change; each thread touches one half of both, between two meetings.
            let (begin, len) = unsafe { ((*tensor.get()).as_mut_ptr(), (*tensor.get()).len() / 2) };
            // SAFETY: as above; the half lies within the vector.
            unsafe { std::slice::from_raw_parts_mut(begin.add(self.index * len), len) }
        });
        let [mut first, mut second] = halves;
        combine_everywhere_on(level, dtype, ReduceOp::Sum, &mut [&mut first, &mut second]);
    }

    /// Seconds between the meetings before and after a case.
    fn time(&mut self, (level, dtype): Case) -> f64 {
        self.rewrite();
        self.meet();
        let begun = Instant::now();
        self.combine(level, dtype);
        self.meet();
        begun.elapsed().as_secs_f64()
    }

    /// Panics when a result differs from the sum of one element.
    fn check(&mut self, (level, dtype): Case) {
        self.time((level, dtype));
        // SAFETY: both threads only read until the meeting that follows.
        let tensors = self.shared.tensors.each_ref().map(|tensor| unsafe { (*tensor.get()).as_slice() });
        let inputs = FILLING.map(|byte| vec![byte; dtype.size()]);
        let mut sum = vec![0; dtype.size()];
        combine(dtype, ReduceOp::Sum, &[Some(&inputs[0]), Some(&inputs[1])], &mut sum);
        let right = tensors.iter().all(|tensor| tensor.chunks(sum.len()).all(|element| element == sum));
        assert!(right, "{level} gives another sum of {}", dtype.name());
        self.meet();
    }
}

type Case = (&'static str, DType);

/// All levels but the portable one, which takes up to a thousand times as long for float16.
fn measured() -> impl Iterator<Item = &'static str> {
    levels().filter(|name| *name == level() || *name != "portable")
}

/// A thread's figures of a round: seconds per meeting, and every case's time.
type Round = (f64, Vec<f64>);

fn measure(thread: &mut Thread<'_>, cases: &[Case], rounds: usize) -> Vec<Round> {
    let mut random: u64 = 1;
    let mut next = |below: usize| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) as usize % below
    };
    let mut order: Vec<usize> = (0..cases.len()).collect();
    let round = |_| {
        (1..order.len()).for_each(|at| order.swap(at, next(at + 1)));
        let distance = thread.distance();
        let mut times = vec![0.0; cases.len()];
        order.iter().for_each(|case| times[*case] = thread.time(cases[*case]));
        (distance, times)
    };
    (0..rounds).map(round).collect()
}

pub fn run() {
    let cores: Vec<usize> = {
        let allowed = processors(0).expect("this thread's cores");
        allowed.iter().take(2).collect()
    };
    let [_, _] = cores[..] else {
        println!("not measured: this needs two cores");
        return;
    };
    let cases: Vec<Case> = measured().flat_map(|level| DTYPES.map(|dtype| (level, dtype))).collect();
    println!("level in use: {}", level());
    for bytes in SIZES {
        let shared = SharedTensors {
            passed: [0, 0].map(|passed| Counter(AtomicU32::new(passed))),
            tensors: FILLING.map(|byte| UnsafeCell::new(vec![byte; bytes])),
        };
        let body = |index: usize| {
            set_processors(&Processors::only(cores[index])).expect("a core that this thread may use");
            let mut thread = Thread { shared: &shared, index, passed: 0 };
            cases.iter().for_each(|case| thread.check(*case));
            // By size only, because both threads have to make as many rounds.
            let each = Duration::from_nanos(bytes as u64 / 2) * cases.len() as u32;
            let rounds = (BUDGET.as_nanos() / each.as_nanos()).clamp(20, 2000) as usize;
            measure(&mut thread, &cases, rounds)
        };
        let (first, second) = thread::scope(|scope| {
            let second = scope.spawn(|| body(1));
            let first = scope.spawn(|| body(0)).join().expect("the first thread");
            (first, second.join().expect("the second thread"))
        });
        let slower = |(one, other): (&Round, &Round)| -> Round {
            (one.0.max(other.0), one.1.iter().zip(&other.1).map(|(one, other)| one.max(*other)).collect())
        };
        show(bytes, &cases, first.iter().zip(&second).map(slower).collect());
    }
}

/// Prints one table, or one for each distance between the cores.
fn show(bytes: usize, cases: &[Case], rounds: Vec<Round>) {
    let distances = || rounds.iter().map(|round| round.0);
    let (least, most) = (distances().fold(f64::INFINITY, f64::min), distances().fold(0.0, f64::max));
    let middle = if most > 2.0 * least { (least * most).sqrt() } else { f64::INFINITY };
    let (near, far): (Vec<Round>, Vec<Round>) = rounds.into_iter().partition(|round| round.0 < middle);
    for rounds in [near, far].iter().filter(|rounds| rounds.len() >= 10) {
        let sorted = |case: usize| {
            let mut times: Vec<f64> = rounds.iter().map(|(_, times)| times[case]).collect();
            times.sort_by(f64::total_cmp);
            times
        };
        let base = cases.iter().position(|case| *case == (level(), DType::F32)).expect("the level in use is available");
        let base = sorted(base);
        let meeting = sorted_median(rounds.iter().map(|round| round.0).collect());
        println!("\n{} KiB, {} rounds, threads meet in {:.0} ns", bytes / KIB, rounds.len(), meeting * 1e9);
        println!("{:<10}{}", "", DTYPES.map(|dtype| format!("{:>16}", dtype.name())).concat());
        for name in measured() {
            let cell = |(index, _): (usize, &Case)| {
                let times = sorted(index);
                let fastest = times[0] / base[0];
                format!("{fastest:>9.2} {:>6.2}", times[times.len() / 2] / base[base.len() / 2])
            };
            let cells: Vec<String> = cases.iter().enumerate().filter(|(_, case)| case.0 == name).map(cell).collect();
            println!("{name:<10}{}", cells.concat());
        }
    }
}

fn sorted_median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
