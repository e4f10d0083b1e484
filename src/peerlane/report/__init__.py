"""Results and problems as text: tables for terminals and Markdown, and a page per problem."""
