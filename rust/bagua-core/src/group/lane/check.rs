//! What arguments must satisfy before anything is sent.

use super::Chunks;
use crate::collective::Io;
use crate::error::{Error, Result};
use crate::types::DType;

/// How the two buffers of an operation relate. n is the number of ranks.
#[derive(Clone, Copy, Debug)]
pub(super) enum Layout {
    /// Source and destination of one size, of any number of elements.
    Equal,
    /// Source and destination of one size, n chunks each.
    EqualChunks,
    /// The destination has n chunks of the source's size.
    Grows,
    /// The source has n chunks of the destination's size.
    Shrinks,
}

/// Which of two separate buffers this rank uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Uses {
    Both,
    SourceOnly,
    DestinationOnly,
}

/// Elements in a buffer of `bytes` bytes.
pub(super) fn elements(dtype: DType, bytes: usize, what: &str) -> Result<usize> {
    if !bytes.is_multiple_of(dtype.size()) {
        return Err(Error::InvalidArgument(format!(
            "{what} has {bytes} bytes, not a whole number of {} elements",
            dtype.name()
        )));
    }
    Ok(bytes / dtype.size())
}

/// Elements as the fingerprint counts them: of the whole tensor for [`Layout::Equal`], of one chunk for the others.
pub(super) fn count(dtype: DType, io: &Io<'_>, layout: Layout, uses: Uses, size: usize) -> Result<usize> {
    let (src, dst) = match io {
        Io::InPlace(data) => {
            let all = elements(dtype, data.len(), "the buffer")?;
            return match layout {
                Layout::Equal => Ok(all),
                Layout::EqualChunks | Layout::Grows | Layout::Shrinks => chunk(all, size, "the buffer"),
            };
        }
        Io::Split { src, dst } => (src.len(), dst.len()),
    };
    // A buffer that is ignored may have any size, so only the used ones are looked at.
    let source = |()| elements(dtype, src, "the source");
    let destination = |()| elements(dtype, dst, "the destination");
    match (layout, uses) {
        (Layout::Equal, Uses::SourceOnly) => source(()),
        (Layout::Equal, Uses::DestinationOnly) => destination(()),
        (Layout::Equal | Layout::EqualChunks, _) => {
            let (src, dst) = (source(())?, destination(())?);
            if src != dst {
                return Err(Error::InvalidArgument(format!("the source has {src} elements, the destination {dst}")));
            }
            if matches!(layout, Layout::Equal) { Ok(src) } else { chunk(src, size, "the source") }
        }
        (Layout::Grows, Uses::SourceOnly) => source(()),
        (Layout::Grows, Uses::DestinationOnly) => chunk(destination(())?, size, "the destination"),
        (Layout::Grows, Uses::Both) => {
            let (one, all) = (source(())?, destination(())?);
            times(one, all, size, "source", "destination").map(|()| one)
        }
        (Layout::Shrinks, Uses::DestinationOnly) => destination(()),
        (Layout::Shrinks, Uses::SourceOnly) => chunk(source(())?, size, "the source"),
        (Layout::Shrinks, Uses::Both) => {
            let (all, one) = (source(())?, destination(())?);
            times(one, all, size, "destination", "source").map(|()| one)
        }
    }
}

fn chunk(all: usize, size: usize, what: &str) -> Result<usize> {
    if !all.is_multiple_of(size) {
        return Err(Error::InvalidArgument(format!("{what} has {all} elements, not a multiple of the {size} ranks")));
    }
    Ok(all / size)
}

fn times(one: usize, all: usize, size: usize, small: &str, large: &str) -> Result<()> {
    if one.checked_mul(size) != Some(all) {
        return Err(Error::InvalidArgument(format!(
            "the {large} has {all} elements, not {size} times (once per rank) the {one} of the {small}"
        )));
    }
    Ok(())
}

/// `root` is a rank of a group of `size`.
pub(super) fn root(root: usize, size: usize) -> Result<u32> {
    match u32::try_from(root) {
        Ok(code) if root < size => Ok(code),
        _ => Err(Error::InvalidArgument(format!("root {root} is not a rank of this group of {size}"))),
    }
}

/// `peer` is another rank of a group of `size`.
pub(super) fn peer(peer: usize, rank: usize, size: usize) -> Result<()> {
    if peer >= size {
        return Err(Error::InvalidArgument(format!("rank {peer} is not a rank of this group of {size}")));
    }
    if peer == rank {
        return Err(Error::InvalidArgument(format!("rank {rank} cannot send to or receive from itself")));
    }
    Ok(())
}

/// Every rank has a part, and every part lies within the `all` elements of the buffer.
pub(super) fn parts(parts: &Chunks<'_>, all: usize, size: usize, what: &str) -> Result<()> {
    for (name, given) in [("counts", parts.counts.len()), ("displacements", parts.displs.len())] {
        if given != size {
            return Err(Error::InvalidArgument(format!("{given} {what} {name} for {size} ranks")));
        }
    }
    for (rank, (count, displ)) in parts.counts.iter().zip(parts.displs).enumerate() {
        if displ.checked_add(*count).is_none_or(|end| end > all) {
            return Err(Error::InvalidArgument(format!(
                "the {what} part of rank {rank}, {count} elements from {displ}, is not within a buffer of {all}"
            )));
        }
    }
    Ok(())
}

/// The part of each rank, to write. The parts lie within `data` (see [`parts`]); they must not overlap.
pub(super) fn split<'a>(mut data: &'a mut [u8], parts: &Chunks<'_>, element: usize) -> Result<Vec<&'a mut [u8]>> {
    let mut order: Vec<usize> = (0..parts.counts.len()).filter(|rank| parts.counts[*rank] > 0).collect();
    order.sort_by_key(|rank| parts.displs[*rank]);
    let mut slices: Vec<&mut [u8]> = parts.counts.iter().map(|_| <&mut [u8]>::default()).collect();
    let mut done = 0;
    let mut before = None;
    for rank in order {
        let (displ, count) = (parts.displs[rank], parts.counts[rank]);
        if let Some(before) = before.filter(|_| displ < done) {
            return Err(Error::InvalidArgument(format!("the receive parts of ranks {before} and {rank} overlap")));
        }
        let (part, rest) = data.split_at_mut((displ - done) * element).1.split_at_mut(count * element);
        slices[rank] = part;
        data = rest;
        done = displ + count;
        before = Some(rank);
    }
    Ok(slices)
}
