/* Between the engine and its pager: rows that move pages, and what happens between rows. */
#ifndef PORT_PAGER_H
#define PORT_PAGER_H

#include "port_model.h"

/* Before the first row of a sample: a medium is there, nothing is under way, the parameters' checksums are known. */
port_status port_pager_begin(port_engine *engine);
/* Run row `index`, one of PORT_STEP_PAGE_*. */
port_status port_pager_row(port_engine *engine, uint16_t index);
/* Look after the transfer under way, without waiting. */
port_status port_pager_poll(port_engine *engine);
/* The copy of the parameters that this step wrote is the one that counts from now on. */
void port_pager_commit(port_engine *engine);

#endif
