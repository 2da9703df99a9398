//! Tables that a connection's writers and iterators began with. A table dropped and created again under its old name is a different table.
//!
//! # Invariant
//!
//! Iterators, writers and waiting calls end with their table, also if another gets its name.

use crate::service::Service;
use replay_core::table::Turn;
use replay_wire::{OpenOrResume, RequestBody};

/// Name and number of each table, usually one or a few.
#[derive(Default)]
pub struct BegunTables(Vec<(String, u16)>);

impl BegunTables {
    /// Turn of a new request, bound to the table that its writer or iterator began with.
    pub fn turn(&mut self, service: &Service, request: &RequestBody) -> Turn {
        let name = match request {
            RequestBody::OpenWriter(OpenOrResume { open, .. }) => {
                self.0.retain(|(name, _)| *name != open.table);
                self.begin(service, &open.table);
                return Turn::default();
            }
            RequestBody::Push(push) => &push.table,
            RequestBody::Sample(sample) if sample.repeated => {
                self.begin(service, &sample.table);
                &sample.table
            }
            _ => return Turn::default(),
        };
        Turn::of_table(self.number(name))
    }

    fn begin(&mut self, service: &Service, name: &str) {
        if self.number(name).is_none()
            && let Ok(table) = service.memory().table(name)
        {
            self.0.push((name.to_owned(), table.number()));
        }
    }

    fn number(&self, name: &str) -> Option<u16> {
        let of_name = self.0.iter().find(|(one, _)| one == name);
        of_name.map(|&(_, number)| number)
    }
}
