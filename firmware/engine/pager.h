/* Interface between the engine and its pager: rows that move pages, and polling between rows. */
#ifndef PORT_PAGER_H
#define PORT_PAGER_H

#include "port_model.h"

/* Before the first row of a sample: requires a medium, no pending transfer, and known parameter checksums. */
port_status port_pager_begin(port_engine *engine);
/* Run row `index`, one of PORT_STEP_PAGE_*. */
port_status port_pager_row(port_engine *engine, uint16_t index);
/* Poll the pending transfer, without waiting. */
port_status port_pager_poll(port_engine *engine);
/* Make the copy of the parameters that this step wrote the valid one. */
void port_pager_commit(port_engine *engine);

#endif
