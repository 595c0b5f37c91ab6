/* The codes of compressed streams: deflate.c. */

#ifndef COMETMQ_DEFLATE_H
#define COMETMQ_DEFLATE_H

/* Computes the codes; once, before anything is compressed. */
void deflate_prepare(void);

#endif
