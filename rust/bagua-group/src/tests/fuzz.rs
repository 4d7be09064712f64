//! The fuzzer: gives inputs that `mutate` makes from the corpus to their parsers.
//!
//! `FUZZ_INPUTS` is the number of inputs. Without it, the test makes as many inputs as fit into 2 seconds. `FUZZ_SEED`
//! determines all inputs. A failure prints the seed, the number of the input, its kind and its bytes. With the same
//! seed and corpus, the input is the same again.

use std::time::{Duration, Instant};

use super::examples::{corpus, hex};
use super::mutate::{Choices, mutate};
use super::targets::TARGETS;

/// Duration of the test if `FUZZ_INPUTS` is not set.
const BUDGET: Duration = Duration::from_secs(2);

/// Minimum number of inputs, even on a slow machine.
const LEAST: u64 = 20_000;

/// Prints the input that was being parsed when a panic ends the run.
struct Current<'a> {
    seed: u64,
    index: u64,
    name: &'static str,
    input: &'a [u8],
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let Current { seed, index, name, input } = self;
            println!("FUZZ_SEED={seed} failed at input {index}:\n{name} {}", hex(input));
        }
    }
}

/// Reads a number from the environment.
#[expect(clippy::disallowed_methods, reason = "`make fuzz` gives seed and number of inputs so")]
fn setting(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}={text} is no number")))
}

#[test]
fn no_input_makes_a_parser_panic_or_hold_memory_beyond_its_limit() {
    let (asked, seed) = (setting("FUZZ_INPUTS"), setting("FUZZ_SEED").unwrap_or(1));
    let corpus = corpus();
    let of: Vec<Vec<usize>> =
        (0..TARGETS.len()).map(|target| (0..corpus.len()).filter(|at| corpus[*at].0 == target).collect()).collect();
    // For each kind, the number of inputs and of those that were parsed.
    let mut counts = [(0_u64, 0_u64); TARGETS.len()];
    let (begin, mut index, mut input) = (Instant::now(), 0, Vec::new());
    let more = |index: u64| match asked {
        Some(inputs) => index < inputs,
        None => index < LEAST || !index.is_multiple_of(1024) || begin.elapsed() < BUDGET,
    };
    while more(index) {
        let mut choices = Choices::new(seed, index);
        // Half of the inputs are messages, because there are many types of them. The other kinds share the rest.
        let target = if choices.below(2) == 0 { 0 } else { choices.below(TARGETS.len()) };
        let own = &of[target];
        input.clone_from(&corpus[own[choices.below(own.len())]].1);
        let other = if choices.below(4) == 0 { choices.below(corpus.len()) } else { own[choices.below(own.len())] };
        mutate(&mut input, &corpus[other].1, &mut choices);
        let current = Current { seed, index, name: TARGETS[target].name, input: &input };
        let parsed = (TARGETS[target].check)(current.input);
        drop(current);
        counts[target].0 += 1;
        counts[target].1 += u64::from(parsed);
        index += 1;
    }
    let seconds = begin.elapsed().as_secs_f64();
    println!("{index} inputs of seed {seed} in {seconds:.1} s, {:.0} per second", index as f64 / seconds);
    for (target, (inputs, parsed)) in TARGETS.iter().zip(counts) {
        println!("{:12} {inputs:9} inputs, of which {parsed:9} were parsed and the others refused", target.name);
        assert!(index < LEAST || (0 < parsed && parsed < inputs), "'{}' tests one outcome only", target.name);
    }
}
