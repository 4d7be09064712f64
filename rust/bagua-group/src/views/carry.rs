//! Data between every two members of a new view, before it is used.
//!
//! Connecting, and a barrier, exchange packets of less than 200 bytes, and a barrier by hosts not even between every two members. A line
//! that loses full packets lets them pass, and the first verb of the new view would fail. In a large view most pairs never exchange
//! anything: there an all_reduce carries data between those that do. In memory that all members share there are no packets.

use super::super::control::FULL;
use super::super::lane::{Lane, Options};
use crate::error::{Error, Result};
use crate::request::{Io, Verb};
use crate::types::{DType, ReduceOp};

/// The most bytes from one member to another: dozens of full packets.
const EACH: usize = 64 << 10;

/// The most bytes from one member to all others.
const ALL: usize = 4 << 20;

/// Numbers of 8 bytes in the all_reduce of a large view: several full packets to each peer, and few enough that they are not divided.
const NUMBERS: usize = 2048;

/// The collective of members that all share memory.
const SHARED: &str = "shm";

/// Sends data from every member to every other, in large views to some others, and checks it, unless all share memory. Collective.
///
/// # Errors
/// Those of the group; `System` when other bytes have come.
pub fn carry_data(lane: &mut Lane) -> Result<()> {
    let (own, size) = (lane.rank(), lane.size());
    if lane.collective() == SHARED {
        return Ok(());
    }
    if size > FULL {
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

/// Adds numbers of all members, and checks the sum.
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
