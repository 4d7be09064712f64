//! What the ranks of a host share, as one of them has it.

use super::book::Book;
use super::windows::{Opened, Signals, Window};

/// What the ranks of a host share.
pub(super) struct Shared {
    /// Index of this rank on its host.
    pub(super) me: usize,
    /// `None` where this rank is the host's only one.
    pub(super) book: Option<Book>,
    pub(super) signals: Signals,
    /// This rank's windows; the last ones are used.
    pub(super) windows: Vec<Window>,
    /// The others', by index; `None` for this rank.
    pub(super) peers: Vec<Option<Peer>>,
    /// Larger windows could not be had.
    pub(super) full: bool,
}

/// What another rank shares.
pub(super) struct Peer {
    pub(super) signals: Signals,
    pub(super) windows: Vec<Opened>,
}

impl Shared {
    pub(super) fn ranks(&self) -> usize {
        self.peers.len()
    }

    /// Bytes of a window.
    pub(super) fn bytes(&self) -> usize {
        self.windows.last().map_or(0, Window::bytes)
    }

    pub(super) fn signals(&self, rank: usize) -> &Signals {
        self.peers[rank].as_ref().map_or(&self.signals, |peer| &peer.signals)
    }

    /// Address of a rank's window.
    pub(super) fn window(&self, rank: usize, turn: usize) -> usize {
        let own = || self.windows.last().map_or(0, |window| window.address(turn));
        let opened = |peer: &Peer| peer.windows.last().map_or(0, |window| window.address(turn, self.bytes()));
        self.peers[rank].as_ref().map_or_else(own, opened)
    }
}
