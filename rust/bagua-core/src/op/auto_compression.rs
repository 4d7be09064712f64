//! The all-reduce of a bucket with or without a codec, whichever is faster here.
//!
//! In the first [`TRIALS`] communications of every [`PERIOD`], a bucket is sent alternately without and with the codec.
//! The ranks then agree on the time of each trial, which is the time of its slowest rank. The variant with the smaller
//! median wins, but the codec must win by more than 5 %. All ranks make the same choice because they compare the same
//! numbers. On a device, marks in its queue of work measure the time. The communication thread waits for the device
//! once per period, before the ranks compare.

use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::{BucketCx, CentralizedOp, CompressedOp, Op};
use crate::error::Result;
use crate::group::Options;
use crate::memory::{Region, Stamp};
use crate::request::{Io, Verb};
use crate::types::{DType, ReduceOp};
use crate::wait::lock;

/// Number of timed communications of a bucket per period. Half of them use the codec.
pub const TRIALS: usize = 10;
/// Number of communications after which the all-reduces with and without the codec are timed and compared again.
pub const PERIOD: u64 = 1000;
/// The codec is used if the median time without it is more than this many times the median time with it.
const PREFER_PLAIN: f64 = 1.05;

/// The all-reduce of a bucket with or without a codec, whichever is faster: see the module.
pub struct AutoOp {
    plain: CentralizedOp,
    compressed: CompressedOp,
    state: Mutex<Trials>,
}

#[derive(Default)]
struct Trials {
    /// Number of communications so far. Not the bucket's step, because a resumed training must time both again.
    count: u64,
    trials: Vec<Trial>,
    /// True if the codec is used after the trials.
    compress: bool,
}

impl AutoOp {
    /// Creates the operation from its two variants, which must give the same result up to the loss of the codec.
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

/// The time of one communication: measured by the host around the call, or by the device between two marks.
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

/// Returns true if the odd trials, which used the codec, were faster.
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
