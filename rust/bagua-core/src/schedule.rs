//! The order in which buckets are communicated: a pure state machine without clock, lock or thread.
//!
//! All ranks must communicate the same buckets in the same order, but autograd completes gradients in an order that
//! differs between ranks. The schedule therefore holds a ready bucket back until all buckets registered before it are
//! released.
//!
//! Invariants, quoted by the tests:
//!
//! 1. **Registered order.** Buckets are released as 0, 1, …, n-1, 0, 1, …, no matter in which order tensors are marked.
//! 2. **Complete.** A bucket is released only if each of its tensors was marked since its last release. Padding counts
//!    as marked.
//! 3. **At once.** The mark that completes the front bucket releases it and every complete bucket behind it.
//! 4. **Nothing without a mark.** A bucket that contains only padding is released together with the next bucket that
//!    has tensors or, if there is none behind it, with the last one that has. If all buckets contain only padding, none
//!    is released.
//! 5. **Errors change nothing.** The state stays as it was if the marked tensor is unknown, was already marked since
//!    its bucket's last release, or is not accepted.

use std::collections::HashSet;

use crate::error::{Error, Result};

/// The position of a tensor: its bucket and its index in that bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorIndex {
    /// Index of the bucket in the schedule.
    pub bucket: usize,
    /// Index of the tensor in the bucket.
    pub tensor: usize,
}

struct Slot {
    name: String,
    padding: bool,
    /// True if the tensor was marked since the last release of its bucket. Always true for padding.
    ready: bool,
}

struct Entry {
    slots: Vec<Slot>,
    tensors: usize,
    missing: usize,
}

/// The schedule of an engine's buckets. The module describes its invariants.
///
/// # Examples
/// ```
/// use bagua_core::schedule::Schedule;
///
/// let bucket = |name: &str| vec![(name.to_owned(), false)];
/// let mut schedule = Schedule::new(vec![bucket("first"), bucket("second")])?;
/// // Tensor 1 is ready, but its bucket waits for the one before it.
/// assert_eq!(schedule.mark_ready(1, |_| Ok(()))?, []);
/// assert_eq!(schedule.mark_ready(0, |_| Ok(()))?, [0, 1]);
/// # Ok::<(), bagua_core::error::Error>(())
/// ```
#[derive(Default)]
pub struct Schedule {
    entries: Vec<Entry>,
    /// The tensors that can be marked, in registered order without padding. A tensor's number is its index here.
    indices: Vec<TensorIndex>,
    /// The bucket to release next. Less than the number of buckets, or 0 if there are none.
    front: usize,
}

impl Schedule {
    /// Creates a schedule of buckets in this order. Each bucket is a list of (tensor name, true if it is padding).
    /// Tensor names must be unique, except for those of padding.
    pub fn new(buckets: Vec<Vec<(String, bool)>>) -> Result<Schedule> {
        let (mut indices, mut names) = (Vec::new(), HashSet::new());
        let mut entries = Vec::with_capacity(buckets.len());
        for (bucket, tensors) in buckets.into_iter().enumerate() {
            for (tensor, (name, _)) in tensors.iter().enumerate().filter(|(_, (_, padding))| !padding) {
                if !names.insert(name.clone()) {
                    return Err(Error::InvalidArgument(format!("tensor '{name}' is in the schedule twice")));
                }
                indices.push(TensorIndex { bucket, tensor });
            }
            let slots: Vec<Slot> =
                tensors.into_iter().map(|(name, padding)| Slot { name, padding, ready: padding }).collect();
            let markable = slots.iter().filter(|slot| !slot.padding).count();
            entries.push(Entry { slots, tensors: markable, missing: markable });
        }
        Ok(Schedule { entries, indices, front: 0 })
    }

    /// Returns the names of the tensors that can be marked. A tensor's number is its position in this list.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.indices.iter().map(|index| self.name(*index))
    }

    fn name(&self, index: TensorIndex) -> &str {
        &self.entries[index.bucket].slots[index.tensor].name
    }

    /// Returns the index of the bucket to release next.
    pub fn front(&self) -> usize {
        self.front
    }

    /// Marks the tensor with this number if `accept` returns `Ok` for its position. Returns the buckets that the mark
    /// releases, in order.
    ///
    /// # Errors
    /// `InvalidArgument` if no tensor has this number or it is already marked; otherwise the error of `accept`.
    pub fn mark_ready(&mut self, number: usize, accept: impl FnOnce(TensorIndex) -> Result<()>) -> Result<Vec<usize>> {
        let known = self.indices.len();
        let index = *self.indices.get(number).ok_or_else(|| {
            Error::InvalidArgument(format!("no tensor has number {number}: {known} tensors are registered"))
        })?;
        if self.entries[index.bucket].slots[index.tensor].ready {
            return Err(Error::InvalidArgument(format!(
                "tensor '{}' was marked ready twice before its bucket was communicated",
                self.name(index)
            )));
        }
        accept(index)?;
        let entry = &mut self.entries[index.bucket];
        entry.slots[index.tensor].ready = true;
        entry.missing -= 1;
        Ok(self.release())
    }

    /// Releases complete buckets, starting at the front. Terminates because each iteration returns, clears a mark, or
    /// wraps around.
    fn release(&mut self) -> Vec<usize> {
        let mut released = Vec::new();
        loop {
            // Invariant 4: buckets without tensors are released with the next bucket that has tensors.
            let next = (self.front..self.entries.len()).find(|bucket| self.entries[*bucket].tensors > 0);
            let end = match next {
                Some(bucket) if self.entries[bucket].missing == 0 => bucket + 1,
                Some(_) => return released,
                // Only buckets of padding are left. They are released with the bucket before them.
                None if !released.is_empty() => self.entries.len(),
                None => return released,
            };
            for bucket in self.front..end {
                self.entries[bucket].clear();
                released.push(bucket);
            }
            self.front = if end == self.entries.len() { 0 } else { end };
        }
    }

    /// Clears every mark and returns to the first bucket, to give up a step that cannot be completed.
    pub fn reset(&mut self) {
        self.entries.iter_mut().for_each(Entry::clear);
        self.front = 0;
    }

    /// Returns the tensors of a bucket that are not marked.
    pub fn missing_in(&self, bucket: usize) -> impl Iterator<Item = &str> {
        self.entries[bucket].slots.iter().filter(|slot| !slot.ready).map(|slot| slot.name.as_str())
    }

    /// Returns the unmarked tensors that keep marked tensors from being communicated. Returns nothing if no tensor is
    /// marked.
    pub fn blocking(&self) -> Vec<&str> {
        let count = self.entries.len();
        let order: Vec<usize> = (0..count).map(|step| (self.front + step) % count).collect();
        // Buckets are released in order, so an unmarked tensor holds back its own bucket and all later ones.
        let last = order.iter().rposition(|bucket| self.entries[*bucket].missing < self.entries[*bucket].tensors);
        let waiting = last.map_or(0, |last| last + 1);
        order[..waiting].iter().flat_map(|bucket| self.missing_in(*bucket)).collect()
    }
}

impl Entry {
    fn clear(&mut self) {
        for slot in &mut self.slots {
            slot.ready = slot.padding;
        }
        self.missing = self.tensors;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Creates a schedule from text: "ab c. ." has the buckets [a, b], [c, padding] and [padding].
    fn schedule(text: &str) -> Schedule {
        let slot = |letter: char| (letter.to_string(), letter == '.');
        Schedule::new(text.split_whitespace().map(|bucket| bucket.chars().map(slot).collect()).collect()).unwrap()
    }

    /// Returns the number of the tensor with this name, or an invalid number if there is none.
    fn number(schedule: &Schedule, name: &str) -> usize {
        schedule.names().position(|known| known == name).unwrap_or(usize::MAX)
    }

    fn mark(schedule: &mut Schedule, name: &str) -> Result<Vec<usize>> {
        schedule.mark_ready(number(schedule, name), |_| Ok(()))
    }

    fn marks(schedule: &mut Schedule, tensors: &str) -> Vec<usize> {
        tensors.chars().flat_map(|tensor| mark(schedule, &tensor.to_string()).unwrap()).collect()
    }

    fn orders(letters: &str) -> Vec<String> {
        if letters.is_empty() {
            return vec![String::new()];
        }
        letters
            .char_indices()
            .flat_map(|(at, letter)| {
                let rest: String = letters.char_indices().filter(|(i, _)| *i != at).map(|(_, c)| c).collect();
                orders(&rest).into_iter().map(move |order| format!("{letter}{order}"))
            })
            .collect()
    }

    #[test]
    fn every_order_of_marks_gives_the_registered_order_of_buckets() {
        // Invariants 1 and 2: all orders of six tensors, each in two steps in a row.
        for order in orders("abcdef") {
            let mut state = schedule("ab c. def");
            assert_eq!(marks(&mut state, &order), [0, 1, 2], "marked in the order {order}");
            assert_eq!(marks(&mut state, "fedcba"), [0, 1, 2], "second step after {order}");
        }
    }

    #[test]
    fn a_complete_bucket_behind_an_incomplete_one_waits_and_is_released_with_it() {
        // Invariant 3.
        let mut state = schedule("a b c");
        assert!(mark(&mut state, "c").unwrap().is_empty());
        assert!(mark(&mut state, "b").unwrap().is_empty());
        assert_eq!(state.blocking(), ["a"]);
        assert_eq!(mark(&mut state, "a").unwrap(), [0, 1, 2]);
        assert_eq!(state.front(), 0);
    }

    #[test]
    fn a_tensor_marked_for_the_next_step_waits_for_the_rest_of_this_one() {
        let mut state = schedule("a b");
        assert_eq!(marks(&mut state, "a"), [0]);
        assert!(marks(&mut state, "a").is_empty());
        assert_eq!(state.blocking(), ["b"]);
        assert_eq!(marks(&mut state, "b"), [1, 0]);
    }

    #[test]
    fn a_tensor_marked_twice_is_refused_by_name_and_changes_nothing() {
        // Invariant 5.
        let mut state = schedule("ab");
        marks(&mut state, "a");
        let error = mark(&mut state, "a").unwrap_err();
        assert!(
            matches!(&error, Error::InvalidArgument(text) if text.contains("'a'") && text.contains("twice")),
            "{error}"
        );
        let unknown = state.mark_ready(2, |_| Ok(())).unwrap_err();
        assert!(unknown.to_string().contains("no tensor has number 2: 2 tensors"));
        let refused = Error::InvalidArgument("in use".to_owned());
        let accept = |index| {
            assert_eq!(index, TensorIndex { bucket: 0, tensor: 1 });
            Err(refused.clone())
        };
        assert_eq!(state.mark_ready(1, accept), Err(refused.clone()));
        assert_eq!(marks(&mut state, "b"), [0]);
    }

    #[test]
    fn padding_is_always_ready_and_cannot_be_marked() {
        let mut state = schedule("a.");
        assert!(mark(&mut state, ".").is_err());
        assert_eq!(marks(&mut state, "aaa"), [0, 0, 0]);
    }

    #[test]
    fn buckets_of_padding_only_are_released_with_their_neighbours_and_never_alone() {
        // Invariant 4.
        let mut state = schedule(". a . b .");
        assert_eq!(marks(&mut state, "a"), [0, 1]);
        assert_eq!(marks(&mut state, "b"), [2, 3, 4]);
        assert_eq!(marks(&mut state, "ba"), [0, 1, 2, 3, 4]);
    }

    #[test]
    fn reset_forgets_an_incomplete_step() {
        let mut state = schedule("a bc");
        assert_eq!(marks(&mut state, "ab"), [0]);
        assert_eq!(state.blocking(), ["c"]);
        state.reset();
        assert!(state.blocking().is_empty());
        assert_eq!(marks(&mut state, "cba"), [0, 1]);
    }

    #[test]
    fn blocking_names_every_unmarked_tensor_up_to_the_last_bucket_with_a_mark() {
        let mut state = schedule("ab cd ef gh");
        marks(&mut state, "ae");
        assert_eq!(state.blocking(), ["b", "c", "d", "f"]);
        assert_eq!(state.missing_in(3).collect::<Vec<_>>(), ["g", "h"]);
    }

    #[test]
    fn a_schedule_without_buckets_refuses_every_tensor_and_blocks_nothing() {
        let mut state = schedule("");
        assert!(mark(&mut state, "a").is_err());
        assert!(state.blocking().is_empty());
        state.reset();
        assert_eq!(state.front(), 0);
    }

    #[test]
    fn a_name_that_appears_twice_is_refused_unless_it_is_padding() {
        let twice = vec![vec![("a".to_owned(), false)], vec![("a".to_owned(), false)]];
        assert!(Schedule::new(twice).err().unwrap().to_string().contains("'a'"));
        assert!(Schedule::new(vec![vec![("p".to_owned(), true), ("p".to_owned(), true)]]).is_ok());
    }

    proptest! {
        /// Invariants 1, 2, 3 and 5, compared with a model that counts marks. In every sequence of marks, bucket k of
        /// step r is released exactly when all tensors of the buckets up to it are marked.
        #[test]
        fn any_sequence_of_marks_agrees_with_the_counting_model(
            sizes in proptest::collection::vec(0usize..4, 1..5),
            picks in proptest::collection::vec(0usize..16, 0..120),
        ) {
            let name = |bucket: usize, tensor: usize| format!("{bucket}.{tensor}");
            let layout = sizes.iter().enumerate().map(|(bucket, size)| {
                // The last slot of each bucket is padding.
                (0..=*size).map(|tensor| (name(bucket, tensor), tensor == *size)).collect()
            }).collect();
            let mut state = Schedule::new(layout).unwrap();
            let all: Vec<(usize, usize)> =
                sizes.iter().enumerate().flat_map(|(bucket, size)| (0..*size).map(move |tensor| (bucket, tensor))).collect();
            prop_assume!(!all.is_empty());
            let mut marked = vec![false; all.len()];
            let mut released = Vec::new();
            for pick in picks {
                let at = pick % all.len();
                let (bucket, tensor) = all[at];
                let result = mark(&mut state, &name(bucket, tensor));
                prop_assert_eq!(result.is_err(), marked[at]);
                let Ok(buckets) = result else { continue };
                marked[at] = true;
                for bucket in buckets {
                    // Invariants 1 and 2.
                    prop_assert_eq!(bucket, released.len() % sizes.len());
                    released.push(bucket);
                    for (at, (owner, _)) in all.iter().enumerate() {
                        if *owner == bucket {
                            prop_assert!(marked[at]);
                            marked[at] = false;
                        }
                    }
                }
                // Invariant 3: the next bucket with tensors is incomplete.
                let next = (state.front()..sizes.len()).find(|bucket| sizes[*bucket] > 0);
                if let Some(next) = next {
                    prop_assert!(state.missing_in(next).count() > 0);
                }
                prop_assert_eq!(state.front(), released.len() % sizes.len());
                prop_assert_eq!(state.blocking().is_empty(), marked.iter().all(|mark| !mark));
            }
        }
    }
}
