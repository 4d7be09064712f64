//! Memory that the ranks of a host share. Also how descriptors of it are passed over Unix connections, which are closed
//! afterwards.
//!
//! The rank with the lowest world rank creates the segment of a lane and passes its descriptor to the other ranks. Each
//! rank makes its own arenas. The same lowest rank collects their descriptors from all ranks and passes them on.

use std::io::{ErrorKind, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, SendAncillaryBuffer, SendAncillaryMessage};

use super::builder::LaneBuilder;
use super::connection::{DataConn, Socket};
use super::fork::ForkFd;
use super::handshake::Purpose;
use super::streams::LaneConns;
use crate::collective::shm::PassDescriptors;
use crate::collective::{OpContext, Shm};
use crate::error::{Error, Result, Source};
use crate::memory::{Arena, Registry};
use crate::platform;
use crate::wait::{blocking_wait, slice_among};

/// `index` of the connections over which the descriptor of a lane's segment is passed.
const LANE_SEGMENT: u32 = 0;

/// `index` of the connections over which the descriptors of arenas are passed.
const ARENAS: u32 = 1;

/// The byte that accompanies a descriptor.
const DESCRIPTOR: u8 = b'M';

/// The byte that ends a list of descriptors.
const END: u8 = b'E';

/// Descriptors of one rank's arenas. `None` for a descriptor that this process had no room for.
type Received = Vec<Option<OwnedFd>>;

impl LaneBuilder<'_> {
    /// Returns the segment of the lane: `len` bytes that the ranks of this host share.
    pub(super) fn segment(&self, host: &[usize], len: usize) -> Result<Arena> {
        let (rank, first) = (self.conns.health.rank(), self.first(host));
        if first != rank {
            let mut descriptors = self.passing(first, LANE_SEGMENT)?.receive()?;
            let descriptor = descriptors.pop().flatten();
            return Arena::from_fd(descriptor.ok_or_else(|| Error::other("no descriptor of the channel's segment"))?);
        }
        let arena = Arena::create("bagua-lane", len)?;
        for peer in host.iter().filter(|peer| **peer != rank) {
            self.passing(*peer, LANE_SEGMENT)?.send([arena.fd()])?;
        }
        Ok(arena)
    }

    /// Makes the collective able to map the arenas of its ranks.
    pub(super) fn knowing_arenas(&self, shm: Shm) -> Shm {
        let between =
            BetweenRanks { conns: self.conns.clone(), hosts: self.hosts.to_vec(), registry: Arc::clone(self.registry) };
        shm.knowing(Arc::clone(self.registry), Box::new(between))
    }

    /// Returns the rank with the lowest world rank. The other ranks can connect to it.
    fn first(&self, host: &[usize]) -> usize {
        let health = &self.conns.health;
        host.iter().copied().min_by_key(|member| health.world_rank(*member)).unwrap_or(health.rank())
    }

    fn passing(&self, peer: usize, index: u32) -> Result<Passing<'_>> {
        let DataConn { fork_fd, socket } = self.connected(peer, Purpose::Segment, index)?;
        let Socket::Unix(stream) = socket else {
            return Err(Error::other("a descriptor cannot be passed over TCP"));
        };
        let slice = Some(slice_among(self.conns.health.size()));
        let limited = stream.set_read_timeout(slice).and_then(|()| stream.set_write_timeout(slice));
        limited.map_err(|e| Error::system("passing shared memory", e))?;
        Ok(Passing { _fork_fd: fork_fd, stream, peer, builder: self })
    }
}

/// Passes the descriptors of arenas between the ranks of a lane on this host.
struct BetweenRanks {
    conns: LaneConns,
    /// Group ranks on each host.
    hosts: Vec<Vec<usize>>,
    registry: Arc<Registry>,
}

impl PassDescriptors for BetweenRanks {
    fn pass(&mut self, cx: &OpContext<'_>, own: &[BorrowedFd<'_>]) -> Result<Vec<Received>> {
        let builder = LaneBuilder {
            conns: &self.conns,
            what: "the arenas of channel",
            hosts: &self.hosts,
            deadline: cx.deadline,
            registry: &self.registry,
        };
        let mut passed = Ok(Vec::new());
        blocking_wait(|| passed = pass(&builder, own));
        passed
    }
}

/// See [`PassDescriptors::pass`]. The first rank collects the descriptors and passes them on.
fn pass(builder: &LaneBuilder<'_>, own: &[BorrowedFd<'_>]) -> Result<Vec<Received>> {
    let (host, local) = builder.host()?;
    let first = builder.first(host);
    if first != host[local] {
        let line = builder.passing(first, ARENAS)?;
        line.send(own.iter().copied())?;
        return host.iter().map(|_| line.receive()).collect();
    }
    let mut lines = Vec::with_capacity(host.len());
    let mut all: Vec<Received> = Vec::with_capacity(host.len());
    for (index, peer) in host.iter().enumerate() {
        lines.push(if index == local { None } else { Some(builder.passing(*peer, ARENAS)?) });
        all.push(lines[index].as_ref().map_or(Ok(Vec::new()), Passing::receive)?);
    }
    for (index, line) in lines.iter().enumerate().filter_map(|(index, line)| Some((index, line.as_ref()?))) {
        for (rank, theirs) in all.iter().enumerate() {
            if rank == local {
                line.send(own.iter().copied())?;
            } else if rank == index {
                line.send([])?;
            } else {
                line.send_received(theirs)?;
            }
        }
    }
    Ok(all)
}

/// A connection over which descriptors are passed.
struct Passing<'a> {
    /// Registration that ends before the connection is closed.
    _fork_fd: ForkFd,
    stream: UnixStream,
    /// Group rank at the other end.
    peer: usize,
    /// Tells why a wait must end.
    builder: &'a LaneBuilder<'a>,
}

impl Passing<'_> {
    fn send<'fd>(&self, descriptors: impl IntoIterator<Item = BorrowedFd<'fd>>) -> Result<()> {
        descriptors.into_iter().try_for_each(|descriptor| self.send_one(DESCRIPTOR, &[descriptor]))?;
        self.send_one(END, &[])
    }

    /// Passes a list on. The receiver finds `None` at the same places.
    fn send_received(&self, descriptors: &Received) -> Result<()> {
        for descriptor in descriptors {
            self.send_one(DESCRIPTOR, descriptor.as_ref().map(AsFd::as_fd).as_slice())?;
        }
        self.send_one(END, &[])
    }

    fn send_one(&self, byte: u8, descriptors: &[BorrowedFd<'_>]) -> Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        self.patiently("passing shared memory to a peer", || {
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            if !descriptors.is_empty() {
                ancillary.push(SendAncillaryMessage::ScmRights(descriptors));
            }
            rustix::net::sendmsg(self.stream.as_fd(), &[IoSlice::new(&[byte])], &mut ancillary, platform::NO_SIGNAL)
        })
        .map(drop)
    }

    fn receive(&self) -> Result<Received> {
        let mut received = Received::new();
        loop {
            match self.receive_one()? {
                (END, _) => return Ok(received),
                (_, descriptor) => received.push(descriptor),
            }
        }
    }

    fn receive_one(&self) -> Result<(u8, Option<OwnedFd>)> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut byte = [0];
        let (bytes, found) = self.patiently("receiving shared memory", || {
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let into = &mut [IoSliceMut::new(&mut byte)];
            let message = rustix::net::recvmsg(self.stream.as_fd(), into, &mut ancillary, platform::CLOSE_ON_EXEC)?;
            let found = ancillary.drain().find_map(|message| match message {
                RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
                _ => None,
            });
            Ok((message.bytes, found))
        })?;
        match bytes {
            0 => Err(self.closed(&Source::default())),
            _ => Ok((byte[0], found)),
        }
    }

    /// Repeats a call that waits for a short slice of time, until it succeeds, the group fails or the deadline passes.
    fn patiently<T>(&self, what: &str, mut call: impl FnMut() -> rustix::io::Result<T>) -> Result<T> {
        loop {
            match call().map_err(std::io::Error::from) {
                Ok(done) => return Ok(done),
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                    self.builder.check(self.peer)?;
                }
                Err(e) if matches!(e.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) => {
                    return Err(self.closed(&e.into()));
                }
                Err(e) => return Err(Error::system(what, e)),
            }
        }
    }

    /// Returns the error for a connection that the peer has closed.
    fn closed(&self, source: &Source) -> Error {
        let how = "it closed the connection for shared memory";
        self.builder.conns.health.attribute_broken_stream(self.peer, how, source)
    }
}

#[cfg(test)]
mod tests {
    use super::super::config::Config;
    use super::super::control::{Control, Plane};
    use super::super::fork::OwnerProcess;
    use super::*;
    use crate::health::GroupHealth;
    use crate::wait::Deadline;

    #[test]
    fn a_peer_that_closes_the_connection_for_descriptors_is_lost_whether_this_rank_sends_or_receives() {
        let health = GroupHealth::new(0, vec![4, 7], vec!["a".to_owned(), "b".to_owned()]);
        let plane = Plane::new(Config::new(4, 8), OwnerProcess::current(), None);
        let control = Arc::new(Control::without_thread(plane));
        let conns = LaneConns { control, health, stats: Arc::default(), group: 1, channel: 0 };
        let (deadline, registry) = (Deadline::after(std::time::Duration::from_secs(60)), Arc::default());
        let builder = LaneBuilder { conns: &conns, what: "lane", hosts: &[vec![0, 1]], deadline, registry: &registry };
        let (stream, theirs) = UnixStream::pair().unwrap();
        let line = Passing { _fork_fd: ForkFd::new(&stream), stream, peer: 1, builder: &builder };
        drop(theirs);
        for error in [line.send([line.stream.as_fd()]).unwrap_err(), line.receive().map(drop).unwrap_err()] {
            let Error::PeerLost { rank, reason, .. } = error else { panic!("{error:?}") };
            assert_eq!((rank, &*reason), (7, "it closed the connection for shared memory"));
        }
    }
}
