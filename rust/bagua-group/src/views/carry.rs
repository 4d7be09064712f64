//! A test of the lines between the members of a new view, before the view is used.
//!
//! A line that loses full packets may still pass the small ones. Connecting and a barrier exchange packets of less
//! than 200 bytes, so they would succeed, and the first verb of the new view would fail. Therefore every member sends
//! full packets to every other member. In a large view most pairs never exchange anything; there an all_reduce sends
//! data between the pairs that do. Members that share memory send no packets and need no test.

use super::super::lane::{Lane, Options};
use crate::error::{Error, Result};
use crate::request::{Io, Verb};
use crate::types::{DType, ReduceOp};

/// The largest view in which every member sends data to every other.
const PAIRS: usize = 16;

/// The most bytes from one member to another: dozens of full packets.
const EACH: usize = 64 << 10;

/// Maximum number of bytes from one member to all other members.
const ALL: usize = 4 << 20;

/// Count of 8-byte elements in the all_reduce of a large view. Each peer gets several full packets, and the all_reduce
/// does not split the tensor.
const NUMBERS: usize = 2048;

/// Name of the collective of members that all share memory.
const SHARED: &str = "shm";

/// Sends data from every member to every other member and checks what arrives. In large views, sends to some members
/// only. Does nothing if all members share memory. Collective.
///
/// # Errors
/// The errors of the group, and `System` if received bytes differ from the bytes sent.
pub fn carry_data(lane: &mut Lane) -> Result<()> {
    let (own, size) = (lane.rank(), lane.size());
    if lane.collective() == SHARED {
        return Ok(());
    }
    if size > PAIRS {
        return add_data(lane);
    }
    let each = EACH.min(ALL / size).max(1);
    let byte = |from: usize, to: usize| (from * 31 + to * 7 + 1) as u8;
    let mut data: Vec<u8> = (0..size).flat_map(|to| std::iter::repeat_n(byte(own, to), each)).collect();
    let options = Options { label: "data between the members of a view", ..Options::DEFAULT };
    lane.run(&options, DType::U8, Verb::AllToAll, Io::in_place(&mut data))?;
    let wrong = data.chunks(each).enumerate().find(|(from, part)| part.iter().any(|got| *got != byte(*from, own)));
    match wrong {
        None => Ok(()),
        Some((from, _)) => Err(Error::other(format!("the data of rank {from} of the new view has changed in transit"))),
    }
}

/// All-reduces known numbers over the members of the new view, and checks the sum.
fn add_data(lane: &mut Lane) -> Result<()> {
    let (own, size) = (lane.rank() as i64, lane.size() as i64);
    let mut data: Vec<u8> = std::iter::repeat_n((own + 1).to_ne_bytes(), NUMBERS).flatten().collect();
    let options = Options { label: "data between the members of a view", ..Options::DEFAULT };
    lane.run(&options, DType::I64, Verb::AllReduce(ReduceOp::Sum), Io::in_place(&mut data))?;
    let sum = (size * (size + 1) / 2).to_ne_bytes();
    if data.chunks(sum.len()).all(|got| got == sum) {
        return Ok(());
    }
    Err(Error::other("the sum of what the members of the new view sent is wrong"))
}
