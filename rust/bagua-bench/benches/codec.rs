//! Speed of every codec on one core, as a ratio to the speed of copying its input. A codec with a ratio above 1 takes
//! less time than the copy.
//!
//!     cargo bench --bench codec                # 10 MiB of float32
//!     cargo bench --bench codec -- bfloat16    # of another element type
//!
//! Every round times the copy and all codecs once, in turn, so that changes of the processor's speed affect all of
//! them. The ratio is that of the medians. The first round checks the decoded values.

use std::hint::black_box;
use std::time::{Duration, Instant};

use bagua_core::codec::{self, Scratch, by_name};
use bagua_core::types::DType;
use half::{bf16, f16};

const BYTES: usize = 10 << 20;
const ROUNDS: usize = 31;

/// Values between -1 and 1, most of them small, as gradients are.
fn elements(dtype: DType) -> Vec<u8> {
    let value = |i: usize| ((i.wrapping_mul(2_654_435_761) >> 8 & 0xffff) as f32 / 32768.0 - 1.0).powi(3);
    let element = |i: usize| match dtype {
        DType::F16 => f16::from_f32(value(i)).to_le_bytes().to_vec(),
        DType::BF16 => bf16::from_f32(value(i)).to_le_bytes().to_vec(),
        _ => value(i).to_le_bytes().to_vec(),
    };
    (0..BYTES / dtype.size()).flat_map(element).collect()
}

fn timed(work: impl FnOnce()) -> Duration {
    let begun = Instant::now();
    work();
    begun.elapsed()
}

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    times[times.len() / 2].as_secs_f64()
}

fn main() {
    if bagua_bench::listed("codec") {
        return;
    }
    let name = std::env::args().skip(1).find(|arg| !arg.starts_with('-'));
    let name = name.as_deref().unwrap_or("float32");
    let dtype = DType::ALL.into_iter().find(|dtype| dtype.name() == name).expect("an element type");
    let given = elements(dtype);
    let count = BYTES / dtype.size();
    let codecs: Vec<_> = codec::NAMES.iter().map(|name| by_name(name, &[]).expect("a known name")).collect();
    let mut records: Vec<Vec<u8>> = codecs.iter().map(|codec| vec![1; codec.record_len(count, dtype)]).collect();
    let mut scratch = Scratch::default();
    let mut copy = vec![1; BYTES];
    let mut back = vec![1; BYTES];
    let mut copies = Vec::new();
    let mut times = vec![(Vec::new(), Vec::new()); codecs.len()];
    for round in 0..=ROUNDS {
        let mut took = vec![timed(|| black_box(&mut copy).copy_from_slice(black_box(&given)))];
        for (codec, record) in codecs.iter().zip(&mut records) {
            took.push(timed(|| {
                let _ = black_box(codec.encode(dtype, black_box(&given), black_box(record), 0, &mut scratch));
            }));
            took.push(timed(|| codec.decode(dtype, black_box(record), black_box(&mut back)).expect("a record")));
            if round == 0 {
                check(codec.name(), codec.record_len(count, dtype), &given, &back);
            }
        }
        // The first round also touches all memory.
        if round > 0 {
            copies.push(took[0]);
            for (times, took) in times.iter_mut().zip(took[1..].chunks_exact(2)) {
                times.0.push(took[0]);
                times.1.push(took[1]);
            }
        }
    }
    let copy = median(copies);
    println!("{} MiB of {name} on one core, level {}", BYTES >> 20, codec::level());
    println!("copy         {:6.2} GB/s", BYTES as f64 / copy / 1e9);
    println!("codec        encode decode   (speed as a multiple of the copy's)");
    for (codec, (encode, decode)) in codecs.iter().zip(times) {
        println!("{:<12} {:6.2} {:6.2}", codec.name(), copy / median(encode), copy / median(decode));
    }
}

/// Checks that a codec returns neither zeros nor its input, because that would be fast.
fn check(name: &str, len: usize, given: &[u8], back: &[u8]) {
    assert!(len > 0 && len < given.len() || name.contains("f16"), "{name}: {len} bytes");
    assert!(back.iter().any(|byte| *byte != 0), "{name} gives zeros");
    let same = given.iter().zip(back).filter(|(given, back)| given == back).count();
    assert!(same < given.len() || name.contains("f16"), "{name} gives back its input");
}
