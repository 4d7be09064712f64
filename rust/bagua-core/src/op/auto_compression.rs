//! The centralized operation with or without a codec, whichever is faster here.
//!
//! In the first [`TRIALS`] communications of every [`PERIOD`] a bucket goes with and without the codec in turns. The ranks then
//! compare: the time of a communication is that of its slowest rank, the faster one by the median is kept, and the plain one
//! where it is within 5 %. All ranks decide alike, because they compare the same numbers. On a device its work is timed, by marks in it;
//! the communication thread waits for it once in a period, before the ranks compare.

use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::{BucketCx, CentralizedOp, CompressedOp, Op};
use crate::error::Result;
use crate::group::Options;
use crate::memory::{Region, Stamp};
use crate::request::{Io, Verb};
use crate::types::{DType, ReduceOp};
use crate::wait::lock;

/// Communications of a bucket that are timed, half of them with the codec.
pub const TRIALS: usize = 10;
/// Communications after which the two are compared again.
pub const PERIOD: u64 = 1000;
/// Times as long as with the codec that the plain communication may take and still be kept.
const PREFER_PLAIN: f64 = 1.05;

/// See the module.
pub struct AutoOp {
    plain: CentralizedOp,
    compressed: CompressedOp,
    state: Mutex<Trials>,
}

/// The trials of a period, and what they decided.
#[derive(Default)]
struct Trials {
    /// Communications so far. Not the bucket's step: a training that is resumed times both anew.
    count: u64,
    /// The trials of this period.
    trials: Vec<Trial>,
    /// Whether the codec makes it faster.
    compress: bool,
}

impl AutoOp {
    /// Both must give the same result, within what the codec loses.
    pub fn new(plain: CentralizedOp, compressed: CompressedOp) -> AutoOp {
        AutoOp { plain, compressed, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, Trials> {
        lock(&self.state)
    }

    fn go(&self, compress: bool, cx: &mut BucketCx<'_>) -> Result<()> {
        if compress { self.compressed.run(cx) } else { self.plain.run(cx) }
    }

    fn timed(&self, compress: bool, cx: &mut BucketCx<'_>) -> Result<Trial> {
        let device = cx.tensors.first().and_then(Region::device).cloned();
        let stamp = || device.as_ref().map_or(Ok(None), |device| device.stamp());
        let (before, start) = (stamp()?, Instant::now());
        self.go(compress, cx)?;
        Ok(match (before, stamp()?) {
            (Some(before), Some(after)) => Trial::Device(before, after),
            _ => Trial::Host(start.elapsed()),
        })
    }
}

/// What a communication took: the host's call, or the device's work.
enum Trial {
    Host(Duration),
    Device(Box<dyn Stamp>, Box<dyn Stamp>),
}

impl Trial {
    fn seconds(&self) -> Result<f64> {
        match self {
            Trial::Host(took) => Ok(took.as_secs_f64()),
            Trial::Device(before, after) => before.seconds_to(&**after),
        }
    }
}

impl Op for AutoOp {
    fn name(&self) -> &'static str {
        "auto"
    }

    fn check(&self, dtype: DType, elements: usize) -> Result<()> {
        self.plain.check(dtype, elements)?;
        self.compressed.check(dtype, elements)
    }

    fn run(&self, cx: &mut BucketCx<'_>) -> Result<()> {
        let (phase, compress) = {
            let mut state = self.state();
            state.count += 1;
            ((state.count - 1) % PERIOD, state.compress)
        };
        if phase >= TRIALS as u64 {
            return self.go(compress, cx);
        }
        let trial = self.timed(phase % 2 == 1, cx)?;
        let trials = {
            let mut state = self.state();
            state.trials.push(trial);
            if state.trials.len() < TRIALS {
                return Ok(());
            }
            std::mem::take(&mut state.trials)
        };
        let mut trials = trials.iter().map(Trial::seconds).collect::<Result<Vec<f64>>>()?;
        let mut bytes: Vec<u8> = trials.iter().flat_map(|seconds| seconds.to_ne_bytes()).collect();
        let options = Options { label: cx.bucket, ..Options::DEFAULT };
        let slowest = Verb::AllReduce(ReduceOp::Max);
        cx.lanes.global.run(&options, DType::F64, slowest, Io::in_place(&mut bytes))?;
        for (seconds, bytes) in trials.iter_mut().zip(bytes.as_chunks().0) {
            *seconds = f64::from_ne_bytes(*bytes);
        }
        self.state().compress = compresses(&trials);
        Ok(())
    }

    fn choice(&self) -> Option<String> {
        Some(if self.state().compress { self.compressed.codec() } else { String::new() })
    }
}

/// Whether the codec, which the odd trials used, makes it faster.
fn compresses(trials: &[f64]) -> bool {
    let median = |odd: usize| {
        let mut seconds: Vec<f64> = trials.iter().skip(odd).step_by(2).copied().collect();
        seconds.sort_unstable_by(f64::total_cmp);
        seconds[seconds.len() / 2]
    };
    median(0) > PREFER_PLAIN * median(1)
}

#[cfg(test)]
mod tests {
    use super::compresses;

    #[test]
    fn the_faster_median_is_kept_and_plain_within_five_percent() {
        let trials = |plain: f64, codec: f64| [plain, codec].repeat(5);
        assert!(compresses(&trials(1.1, 1.0)));
        assert!(!compresses(&trials(1.04, 1.0)));
        assert!(!compresses(&trials(0.5, 1.0)));
        let mut outlier = trials(2.0, 1.0);
        outlier[1] = 100.0;
        assert!(compresses(&outlier), "one slow trial does not decide");
    }
}
