//! Which bucket goes next: a pure state machine, no clock, no lock, no thread.
//!
//! Every rank must communicate the same buckets in the same order, but autograd finishes gradients in an order of its own. The
//! schedule therefore holds a ready bucket back until all buckets registered before it went.
//!
//! Invariants, quoted by the tests:
//!
//! 1. **Registered order.** Buckets go as 0, 1, …, n-1, 0, 1, …, whatever the order of the marks.
//! 2. **Complete.** A bucket goes only when each of its tensors was marked since it last went; padding counts as marked.
//! 3. **At once.** The mark that completes the front bucket releases it and every complete bucket behind it.
//! 4. **Nothing without a mark.** A bucket of padding only goes with the next bucket that has tensors, or, behind the last of
//!    those, with that one; buckets that hold nothing but padding never go by themselves.
//! 5. **Refusals change nothing.** A tensor marked twice before its bucket went, or an unknown one, leaves the state as it was.

use std::collections::HashSet;

use crate::error::{Error, Result};

/// The bucket of a tensor, and its index there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorIndex {
    /// Index of its bucket.
    pub bucket: usize,
    /// Index in its bucket.
    pub tensor: usize,
}

/// A tensor as the schedule sees it.
struct Slot {
    name: String,
    padding: bool,
    /// Marked since its bucket last went. Always true for padding.
    ready: bool,
}

/// A bucket as the schedule sees it.
struct Entry {
    slots: Vec<Slot>,
    /// Tensors that have to be marked.
    tensors: usize,
    /// How many of them are not marked.
    missing: usize,
}

/// See the module.
#[derive(Default)]
pub struct Schedule {
    entries: Vec<Entry>,
    /// Of the tensors that can be marked, by number: in registered order, padding left out.
    places: Vec<TensorIndex>,
    /// The bucket that must go next; below the number of buckets, or 0 when there are none.
    front: usize,
}

impl Schedule {
    /// A schedule of buckets in this order, each a list of (tensor name, padding). A name that appears twice is refused; the
    /// names of padding are not looked at.
    pub fn new(buckets: Vec<Vec<(String, bool)>>) -> Result<Schedule> {
        let (mut places, mut names) = (Vec::new(), HashSet::new());
        let mut entries = Vec::with_capacity(buckets.len());
        for (bucket, tensors) in buckets.into_iter().enumerate() {
            for (tensor, (name, _)) in tensors.iter().enumerate().filter(|(_, (_, padding))| !padding) {
                if !names.insert(name.clone()) {
                    return Err(Error::InvalidArgument(format!("tensor '{name}' is in the schedule twice")));
                }
                places.push(TensorIndex { bucket, tensor });
            }
            let slots: Vec<Slot> =
                tensors.into_iter().map(|(name, padding)| Slot { name, padding, ready: padding }).collect();
            let markable = slots.iter().filter(|slot| !slot.padding).count();
            entries.push(Entry { slots, tensors: markable, missing: markable });
        }
        Ok(Schedule { entries, places, front: 0 })
    }

    /// Names of the tensors that can be marked, by number.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.places.iter().map(|place| self.name(*place))
    }

    fn name(&self, place: TensorIndex) -> &str {
        &self.entries[place.bucket].slots[place.tensor].name
    }

    /// The bucket that must go next.
    pub fn front(&self) -> usize {
        self.front
    }

    /// Whether `mark_ready` would accept the tensor of this number, and where it is.
    ///
    /// # Errors
    /// `InvalidArgument` for a number that no tensor has, and for a tensor that is marked already.
    pub fn check(&self, number: usize) -> Result<TensorIndex> {
        let known = self.places.len();
        let place = *self.places.get(number).ok_or_else(|| {
            Error::InvalidArgument(format!("no tensor has number {number}: {known} tensors are registered"))
        })?;
        if self.entries[place.bucket].slots[place.tensor].ready {
            return Err(Error::InvalidArgument(format!(
                "tensor '{}' was marked ready twice before its bucket was communicated",
                self.name(place)
            )));
        }
        Ok(place)
    }

    /// Marks the tensor of this number, and returns the buckets that go now, in order.
    ///
    /// # Errors
    /// As [`Schedule::check`].
    pub fn mark_ready(&mut self, number: usize) -> Result<Vec<usize>> {
        let place = self.check(number)?;
        let entry = &mut self.entries[place.bucket];
        entry.slots[place.tensor].ready = true;
        entry.missing -= 1;
        Ok(self.release())
    }

    /// Takes every complete bucket from the front. Ends because each round either stops or clears at least one mark or wraps.
    fn release(&mut self) -> Vec<usize> {
        let mut due = Vec::new();
        loop {
            // Invariant 4: buckets without tensors go with the next one that has some.
            let next = (self.front..self.entries.len()).find(|bucket| self.entries[*bucket].tensors > 0);
            let end = match next {
                Some(bucket) if self.entries[bucket].missing == 0 => bucket + 1,
                Some(_) => return due,
                // Only padding is left of this round; it goes with the bucket that was released just before.
                None if !due.is_empty() => self.entries.len(),
                None => return due,
            };
            for bucket in self.front..end {
                self.entries[bucket].clear();
                due.push(bucket);
            }
            self.front = if end == self.entries.len() { 0 } else { end };
        }
    }

    /// Forgets every mark; the next bucket to go is the first. For a step that cannot be completed.
    pub fn reset(&mut self) {
        self.entries.iter_mut().for_each(Entry::clear);
        self.front = 0;
    }

    /// The tensors of a bucket that are not marked.
    pub fn missing_in(&self, bucket: usize) -> impl Iterator<Item = &str> {
        self.entries[bucket].slots.iter().filter(|slot| !slot.ready).map(|slot| slot.name.as_str())
    }

    /// The tensors that keep marked ones from going: those not marked in the buckets from the front to the last one, in order
    /// of communication, that holds a mark. Empty when nothing is marked.
    pub fn blocking(&self) -> Vec<&str> {
        let count = self.entries.len();
        let order: Vec<usize> = (0..count).map(|step| (self.front + step) % count).collect();
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

    /// Buckets from a drawing: "ab c. ." is [a, b], [c, padding], [padding].
    fn schedule(drawing: &str) -> Schedule {
        let slot = |letter: char| (letter.to_string(), letter == '.');
        Schedule::new(drawing.split_whitespace().map(|bucket| bucket.chars().map(slot).collect()).collect()).unwrap()
    }

    /// Number of the tensor of this name; one that no tensor has for an unknown name.
    fn number(schedule: &Schedule, name: &str) -> usize {
        schedule.names().position(|known| known == name).unwrap_or(usize::MAX)
    }

    fn mark(schedule: &mut Schedule, name: &str) -> Result<Vec<usize>> {
        schedule.mark_ready(number(schedule, name))
    }

    fn marks(schedule: &mut Schedule, tensors: &str) -> Vec<usize> {
        tensors.chars().flat_map(|tensor| mark(schedule, &tensor.to_string()).unwrap()).collect()
    }

    /// Every order of the letters.
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
        // Invariants 1 and 2, exhaustively for six tensors, and for two steps in a row.
        for order in orders("abcdef") {
            let mut state = schedule("ab c. def");
            assert_eq!(marks(&mut state, &order), [0, 1, 2], "marked in the order {order}");
            assert_eq!(marks(&mut state, "fedcba"), [0, 1, 2], "second step after {order}");
        }
    }

    #[test]
    fn a_ready_bucket_behind_an_unready_one_waits_and_then_goes_with_it() {
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
        assert!(state.mark_ready(2).unwrap_err().to_string().contains("no tensor has number 2: 2 tensors"));
        assert_eq!(marks(&mut state, "b"), [0]);
    }

    #[test]
    fn padding_is_always_ready_and_cannot_be_marked() {
        let mut state = schedule("a.");
        assert!(mark(&mut state, ".").is_err());
        assert_eq!(marks(&mut state, "aaa"), [0, 0, 0]);
    }

    #[test]
    fn buckets_of_padding_only_go_with_their_neighbours_and_never_alone() {
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
    fn blocking_names_every_missing_tensor_up_to_the_last_bucket_that_was_touched() {
        let mut state = schedule("ab cd ef gh");
        marks(&mut state, "ae");
        assert_eq!(state.blocking(), ["b", "c", "d", "f"]);
        assert_eq!(state.missing_in(3).collect::<Vec<_>>(), ["g", "h"]);
    }

    #[test]
    fn a_schedule_without_buckets_knows_no_tensor_and_blocks_nothing() {
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
        /// Invariants 1, 2, 3 and 5 against a model that counts marks: whatever is marked in whatever order, bucket k of round r
        /// goes exactly when all marks of the buckets up to it are there.
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
            let mut went = Vec::new();
            for pick in picks {
                let at = pick % all.len();
                let (bucket, tensor) = all[at];
                let result = mark(&mut state, &name(bucket, tensor));
                prop_assert_eq!(result.is_err(), marked[at]);
                let Ok(due) = result else { continue };
                marked[at] = true;
                for bucket in due {
                    // 1: the order; 2: complete.
                    prop_assert_eq!(bucket, went.len() % sizes.len());
                    went.push(bucket);
                    for (at, (owner, _)) in all.iter().enumerate() {
                        if *owner == bucket {
                            prop_assert!(marked[at]);
                            marked[at] = false;
                        }
                    }
                }
                // 3: the next bucket with tensors is incomplete.
                let next = (state.front()..sizes.len()).find(|bucket| sizes[*bucket] > 0);
                if let Some(next) = next {
                    prop_assert!(state.missing_in(next).count() > 0);
                }
                prop_assert_eq!(state.front(), went.len() % sizes.len());
                prop_assert_eq!(state.blocking().is_empty(), marked.iter().all(|mark| !mark));
            }
        }
    }
}
